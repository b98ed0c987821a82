"""The Fisher information of linears: against the whole model's own backward pass, and after a kill."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate import fisher
from calibrate.drawing import draw
from calibrate.fisher import LayerFisher, measure
from models.checkpoint import Folder
from models.errors import BadInput
from models.family import Linear
from models.opened import OpenedModel, open_model
from models.skeleton import load_model
from tests.helpers import tiny_checkpoint, tokens

WINDOWS = tokens(6, 24)


@pytest.fixture(scope="module", params=["llama", "spark2_5"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    yield open_model(Folder(tiny_checkpoint(folder, request.param, num_hidden_layers=2)))


def whole(model: OpenedModel, windows: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Gradients [tokens, N] at the linears' outputs, with the tokens that `fisher` draws, by one whole pass."""
    whole = load_model(model.checkpoint, torch.float32)
    gradients: dict[str, torch.Tensor] = {}

    def watched(linear: Linear) -> Callable[[object, object, torch.Tensor], None]:
        def keep(gradient: torch.Tensor) -> None:
            gradients[linear.name] = gradient[..., linear.start : linear.stop]

        def watch(_: object, __: object, output: torch.Tensor) -> None:
            output.register_hook(keep)

        return watch

    for linear in model.linears:
        if linear.layer is not None:
            whole.get_submodule(linear.module).register_forward_hook(watched(linear))
    whole.get_input_embeddings().register_forward_hook(lambda _, __, output: output.requires_grad_())
    logits = whole(input_ids=windows, use_cache=False).logits.flatten(0, 1)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.cat([draw(torch.softmax(part.detach(), -1), generator) for part in logits.split(fisher.ROWS)])
    torch.nn.functional.cross_entropy(logits, drawn[:, 0], reduction="sum").backward()
    return {name: gradient.flatten(0, 1) for name, gradient in gradients.items()}


def test_it_is_that_of_the_whole_models_backward_pass(
    model: OpenedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fisher, "SPAN", 96)
    found = measure(model.checkpoint, model.linears, torch.float32, WINDOWS, tmp_path, seed=3)
    expected = whole(model, WINDOWS, seed=3)
    assert len(expected) >= 12
    for linear in model.linears:
        if linear.layer is None:
            continue
        layer, gradients = found.load(linear.layer), expected[linear.name].double()
        torch.testing.assert_close(layer.tokens[linear.name].double(), gradients.norm(dim=-1), rtol=1e-3, atol=1e-6)
        spans = layer.outputs[linear.name]
        assert [len(span) for span in spans] == [len(part) for part in torch.arange(linear.rows).split(96)]
        scaled = gradients / gradients.norm(dim=-1, keepdim=True).sqrt().clamp_min(1e-15)
        for span, part in zip(spans, scaled.split(96, -1), strict=True):
            products = part.t() @ part / WINDOWS.numel()
            torch.testing.assert_close(span.double(), products, rtol=1e-3, atol=1e-5 * float(products.abs().max()))


@pytest.mark.parametrize("writes", range(7))
def test_a_killed_measurement_continues_to_the_same_bytes(
    model: OpenedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    def run(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        measure(model.checkpoint, model.linears, torch.bfloat16, WINDOWS, folder)

    class Killed(BaseException):
        pass

    left = [writes]
    save = fisher.save_tensors

    def killed(*arguments: object) -> None:
        if not left[0]:
            raise Killed
        left[0] -= 1
        save(*arguments)  # type: ignore[arg-type]

    run(tmp_path / "straight")
    monkeypatch.setattr(fisher, "save_tensors", killed)
    with pytest.raises(Killed):
        run(tmp_path / "killed")
    monkeypatch.setattr(fisher, "save_tensors", save)
    run(tmp_path / "killed")
    straight, resumed = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("straight", "killed")
    )
    # Nothing is left but the layers.
    assert straight.keys() == {"layer-00000.safetensors", "layer-00001.safetensors"}
    assert straight == resumed


def test_one_tokens_gradient_does_not_decide() -> None:
    sizes = torch.ones(1000)
    sizes[7] = 1e9
    counts = LayerFisher({"q": sizes, "k": torch.ones(1000)}, {}).counts(["q", "k"])
    assert counts.mean() == pytest.approx(1)
    # Both linears count half; q's share is that one token's but for the limit.
    assert float(counts[7]) == pytest.approx(100 / (100 + 0.5 * 999) * 1000, rel=0.01)


@pytest.mark.parametrize("name", ["self_attn.k_proj.weight", "input_layernorm.weight"])
def test_a_weight_that_is_not_a_number_is_named(tmp_path: Path, name: str) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.1.{name}"].view(-1)[3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    broken = open_model(Folder(folder))
    with pytest.raises(BadInput, match=rf"model\.layers\.1\.{name}"):
        measure(broken.checkpoint, broken.linears, torch.bfloat16, WINDOWS, tmp_path)
