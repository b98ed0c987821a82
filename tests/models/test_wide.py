"""Products of 16-bit numbers: where they are computed in fp32, and that they come to the same."""

from pathlib import Path

import pytest
import torch
from torch import nn

from models import wide
from models.checkpoint import Folder
from models.skeleton import skeleton
from models.wide import WideLinear, linear, multiplies
from tests.helpers import tiny_checkpoint

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
