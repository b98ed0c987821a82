"""Products and attention of 16-bit numbers: where they are computed in fp32, and that they come to the same."""

from pathlib import Path

import pytest
import torch
from torch import nn

from models import wide
from models.checkpoint import Folder
from models.skeleton import load_model, skeleton
from models.wide import WideLinear, linear, multiplies
from tests.helpers import MODEL_TYPES, tiny_checkpoint, tokens

DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies 16-bit numbers slowly."""
    monkeypatch.setattr(wide, "multiplies", lambda dtype: dtype not in DTYPES)
    # Several blocks of every weight here, the last of another size.
    monkeypatch.setattr(wide, "BLOCK", 1000)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, wide.ROWS, 64])
def test_a_product_is_the_fp64_one_rounded_once(narrow: None, dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, rows, 96), (40, 96), (40,)))
    exact = nn.functional.linear(x.double(), weight.double(), bias.double())
    found = linear(x, weight, bias)
    assert found.dtype == dtype
    # Half a step of the dtype's, and what fp32's sum of 97 terms may move it.
    torch.testing.assert_close(found.double(), exact, rtol=0.5 * torch.finfo(dtype).eps + 1e-6, atol=2e-5)


def test_gradients_are_those_of_the_product_in_16_bits(narrow: None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, g = (torch.randn(*s, generator=generator).bfloat16() for s in ((32, 48), (24, 48), (32, 24)))
    x.requires_grad_()
    weight.requires_grad_()
    linear(x, weight).backward(g)
    assert x.grad is not None and weight.grad is not None
    assert x.grad.dtype == weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(x.grad.double(), g.double() @ weight.double(), rtol=0.004, atol=1e-4)
    torch.testing.assert_close(weight.grad.double(), g.double().t() @ x.double(), rtol=0.004, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("new", "before", "masked"), [(24, 0, False), (24, 0, True), (24, 8, True), (1, 31, False)])
def test_attention_and_its_gradients_are_the_fp64_ones_rounded(
    narrow: None, dtype: torch.dtype, new: int, before: int, masked: bool
) -> None:
    """In blocks of one window and of several, causal and under a mask; a token alone reads all before it."""
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, head_dim = 6, 2, 16
    shapes = ((3, heads, new, head_dim), *[(3, kv_heads, before + new, head_dim)] * 2, (3, new, heads, head_dim))
    query, key, value, g = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    module = nn.Module()
    module.num_key_value_groups = heads // kv_heads  # type: ignore[assignment]
    module.is_causal = True  # type: ignore[assignment]
    seen = torch.ones(new, before + new, dtype=torch.bool).tril(before)
    mask = (seen & (torch.rand(3, 1, new, before + new, generator=generator) > 0.3)) | torch.eye(
        new, before + new, dtype=torch.bool
    )
    exact = [t.double().requires_grad_() for t in (query, key, value)]
    found = [t.clone().requires_grad_() for t in (query, key, value)]
    scores = exact[0] @ exact[1].repeat_interleave(3, 1).mT * 0.3
    weights = scores.masked_fill(~(mask if masked else seen), -torch.inf).softmax(-1)
    expected = (weights @ exact[2].repeat_interleave(3, 1)).transpose(1, 2)
    expected.backward(g.double())
    q, k, v = found
    output, _ = wide.attend(module, q, k, v, mask if masked else None, scaling=0.3, dropout=0.0)
    output.backward(g)
    assert output.dtype == dtype
    half = 0.5 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=half + 1e-6, atol=1e-5)
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == dtype
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=half + 1e-6, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_where_16_bits_multiply_fast_only_a_token_alone_attends_in_fp32(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(wide, "multiplies", lambda dtype: True)
    generator = torch.Generator().manual_seed(0)
    module = nn.Module()
    module.num_key_value_groups, module.is_causal = 3, True  # type: ignore[assignment]
    key, value = (torch.randn(2, 2, 40, 16, generator=generator).to(dtype) for _ in range(2))
    for new in (1, 2, 40):
        query = torch.randn(2, 6, new, 16, generator=generator).to(dtype)
        mask = torch.ones(new, 40, dtype=torch.bool).tril(40 - new).expand(2, 1, -1, -1) if new > 1 else None
        found, _ = wide.attend(module, query, key, value, mask, scaling=0.3)
        theirs, _ = wide.sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
        scores = query.double() @ key.double().repeat_interleave(3, 1).mT * 0.3
        scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
        exact = (scores.softmax(-1) @ value.double().repeat_interleave(3, 1)).transpose(1, 2)
        rounded = torch.allclose(found.double(), exact, rtol=0.5 * torch.finfo(dtype).eps + 1e-6, atol=1e-6)
        assert rounded == (new == 1)
        assert torch.equal(found, theirs) == (new > 1)


def test_a_models_attention_is_the_same_function_in_fp32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The mask of a padded batch included, which transformers makes by the attention's name."""
    checkpoint = Folder(tiny_checkpoint(tmp_path))
    ids = tokens(2, 12)
    padded = torch.ones_like(ids)
    padded[1, :5] = 0
    logits = []
    for slow in (True, False):
        # Of fp32, so that both ways come to the same.
        monkeypatch.setattr(wide, "NARROW", (torch.float32,) if slow else ())
        monkeypatch.setattr(wide, "multiplies", lambda dtype, slow=slow: not slow)
        model = load_model(checkpoint, torch.float32)
        assert (model.config._attn_implementation == wide.ATTENTION) == slow
        logits.append(model(input_ids=ids, attention_mask=padded).logits)
    torch.testing.assert_close(*logits)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("given", "found"), [("sdpa", wide.ATTENTION), ("eager", "eager")])
def test_only_torchs_own_attention_is_replaced(
    monkeypatch: pytest.MonkeyPatch, model_type: str, given: str, found: str, fast: bool, tmp_path: Path
) -> None:
    monkeypatch.setattr(wide, "multiplies", lambda dtype: fast or dtype not in DTYPES)
    checkpoint = Folder(tiny_checkpoint(tmp_path, model_type))
    assert skeleton(checkpoint, torch.bfloat16, given).config._attn_implementation == found
    assert skeleton(checkpoint, torch.float32, given).config._attn_implementation == given


def test_a_models_linears_are_wide_only_where_16_bit_products_are_slow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint = Folder(tiny_checkpoint(tmp_path))
    for slow in (True, False):
        monkeypatch.setattr(wide, "multiplies", lambda dtype, slow=slow: dtype not in DTYPES or not slow)
        for dtype, expected in ((torch.bfloat16, slow), (torch.float32, False)):
            linears = [m for m in skeleton(checkpoint, dtype).modules() if isinstance(m, nn.Linear)]
            assert linears and all(isinstance(m, WideLinear) == expected for m in linears)


def test_fp32_never_needs_another_product() -> None:
    assert multiplies(torch.float32) and multiplies(torch.float64)
