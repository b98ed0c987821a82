"""Layer-wise quantisation: later layers see the earlier ones' error, and a killed run ends with the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate import quantize as module
from calibrate.grid import Grid
from calibrate.methods import choose
from calibrate.quantize import Recipe, quantize
from calibrate.replay import Replay, batches
from calibrate.results import Hidden, QuantizedLayer, Results
from calibrate.search import error, round_to_nearest, search
from calibrate.statistics import Moments
from models.checkpoint import Folder
from models.errors import BadInput
from models.opened import OpenedModel, open_model
from models.skeleton import load_model
from tests.helpers import tiny_checkpoint, tokens

WINDOWS = tokens(5, 24)
LAYERS = 4


class Killed(BaseException):
    pass


@pytest.fixture(autouse=True)
def several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two windows a batch, so that the last one is smaller."""
    monkeypatch.setattr("calibrate.replay.BATCH_TOKENS", 48)


@pytest.fixture
def model(tmp_path: Path) -> OpenedModel:
    return open_model(Folder(tiny_checkpoint(tmp_path / "model", "spark2_5")))


def recipe(model: OpenedModel, method: str = "search", skip: str = "", zero: str = "none") -> Recipe:
    grids = {linear.name: Grid(32, zero) for linear in model.linears}  # type: ignore[arg-type]
    chosen = tuple((name, grid) for name, grid in grids.items() if not skip or skip not in name)
    return Recipe(chosen, (method,), torch.bfloat16)


def run(
    model: OpenedModel, recipe: Recipe, folder: Path, windows: torch.Tensor | None = WINDOWS, **arguments: Any
) -> Results:
    results = Results(folder)
    quantize(model.checkpoint, model.linears, recipe, windows, results, **arguments)
    return results


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def killed_at(patch: pytest.MonkeyPatch, layer: int, where: str) -> None:
    """Ends the run in layer ``layer``: before it, when its hidden states or itself were saved, or at its clean-up."""
    save, unlink = module.Results.save, Path.unlink

    def at_save(results: Results, index: int, found: QuantizedLayer, hidden: Hidden | None = None) -> None:
        if index == layer and where == "before":
            raise Killed
        if index == layer and where == "hidden":
            patch.setattr(results, "_layer", lambda _: (_ for _ in ()).throw(Killed()))
        save(results, index, found, hidden)
        if index == layer and where == "after":
            raise Killed

    def at_unlink(path: Path, missing_ok: bool = False) -> None:
        if where == "clean-up" and path.name == f"hidden-{layer:05d}.safetensors":
            raise Killed
        unlink(path, missing_ok)

    patch.setattr(module.Results, "save", at_save)
    patch.setattr(Path, "unlink", at_unlink)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenedModel, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    model = open_model(Folder(tiny_checkpoint(folder / "model", "spark2_5")))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("calibrate.replay.BATCH_TOKENS", 48)
        run(model, recipe(model), folder / "results")
    return model, files(folder / "results")


@pytest.mark.parametrize(
    ("layer", "where"),
    [(layer, where) for layer in range(LAYERS) for where in ("before", "hidden", "after", "clean-up")]
    + [(LAYERS, "before"), (LAYERS, "after"), (LAYERS, "clean-up")],
)
def test_a_run_killed_at_any_layer_ends_with_the_same_files(
    undisturbed: tuple[OpenedModel, dict[str, bytes]], tmp_path: Path, layer: int, where: str
) -> None:
    model, expected = undisturbed
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        killed_at(patch, layer, where)
        run(model, recipe(model), tmp_path)
    finished = layer if where in ("before", "hidden") else layer + 1
    assert Results(tmp_path).first_missing(LAYERS + 1) == finished
    steps: list[tuple[int, int]] = []
    run(model, recipe(model), tmp_path, progress=lambda _, done, total: steps.append((done, total)))
    # At most the layer in which it was killed is done again.
    assert steps == [(done, LAYERS + 1) for done in range(finished, LAYERS + 2)]
    assert files(tmp_path) == expected


@pytest.mark.parametrize(("layer", "where"), [(0, "after"), (2, "hidden"), (LAYERS, "before")])
def test_a_killed_run_of_methods_that_compare_ends_with_the_same_files(
    model: OpenedModel, tmp_path: Path, layer: int, where: str
) -> None:
    chosen = replace(recipe(model), method=("gptq", "refine"))
    run(model, chosen, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        killed_at(patch, layer, where)
        run(model, chosen, tmp_path / "killed")
    run(model, chosen, tmp_path / "killed")
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_methods_that_compare_see_the_sources_hidden_states(model: OpenedModel, tmp_path: Path) -> None:
    replay = Replay(model.checkpoint, torch.bfloat16)
    expected = replay.embed(batches(WINDOWS))
    for index in range(2):
        with replay.layer(index) as layer:
            expected = [replay.run(layer, index, h) for h in expected]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        killed_at(patch, 1, "after")
        run(model, replace(recipe(model), method=("gptq",)), tmp_path)
    found = Results(tmp_path).load_hidden(2)
    assert all(torch.equal(a, b) for a, b in zip(found.reference, expected, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found.quantized, expected, strict=True))


def test_only_layers_are_left_and_a_finished_run_does_nothing(
    undisturbed: tuple[OpenedModel, dict[str, bytes]], tmp_path: Path
) -> None:
    model, expected = undisturbed
    assert sorted(expected) == [f"layer-{i:05d}.safetensors" for i in range(LAYERS + 1)]
    for name, content in expected.items():
        (tmp_path / name).write_bytes(content)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    run(model, recipe(model), tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_at_most_two_files_of_hidden_states_lie_on_the_disk(model: OpenedModel, tmp_path: Path) -> None:
    seen: list[list[str]] = []
    run(model, recipe(model), tmp_path / "r", progress=lambda *_: seen.append(sorted(files(tmp_path / "r"))))
    hidden = [[name for name in names if name.startswith("hidden")] for names in seen]
    assert hidden == [[], *([f"hidden-{i:05d}.safetensors"] for i in range(1, LAYERS + 1)), []]


def test_a_linear_sees_what_the_quantised_ones_before_it_give(model: OpenedModel, tmp_path: Path) -> None:
    """Everything that layer 1 is chosen by, computed directly: the whole model with what comes before as quantised."""
    results = run(model, recipe(model), tmp_path / "results")
    full = load_model(model.checkpoint, torch.bfloat16)
    put(full, model, results.load(0))
    second = results.load(1)
    linears = [linear for linear in model.linears if linear.layer == 1]
    together = module.groups(model.family, "model.layers.1.", linears)
    assert [[linear.name.rpartition(".")[2] for linear in group] for group in together] == [
        ["q_proj", "k_proj", "v_proj"],
        ["out_proj"],
        ["gate_proj", "up_proj"],
        ["down_proj"],
    ]
    for group in together:
        moments = full_moments(full, group[0].module)
        for linear in group:
            rows = full.get_submodule(linear.module).weight[linear.start : linear.stop].float()
            expected = search(rows, Grid(32), moments)
            assert torch.equal(second.linears[linear.name].codes, expected.codes), linear.name
            assert second.errors[linear.name] == pytest.approx(error(rows, expected, moments), rel=1e-4)
        put(full, model, QuantizedLayer({linear.name: second.linears[linear.name] for linear in group}))


@pytest.mark.parametrize("short", ["self_attn.out_proj", "mlp.down_proj", "mlp.up_proj"])
@pytest.mark.parametrize("biases", [False, True])
def test_compensation_sees_what_the_inputs_and_the_residual_stream_have_in_the_source(
    model: OpenedModel, tmp_path: Path, short: str, biases: bool
) -> None:
    """Computed directly, as above: beside the quantised model's inputs and stream those of the source."""
    if biases:
        short = short.replace("out_proj", "o_proj")
        model = open_model(Folder(tiny_checkpoint(tmp_path / "biased", "llama", attention_bias=True, mlp_bias=True)))
    results = run(model, replace(recipe(model), method=("gptq",)), tmp_path / "results")
    source, full = (load_model(model.checkpoint, torch.bfloat16) for _ in range(2))
    put(full, model, results.load(0))
    second = results.load(1).linears
    order = ["q_proj", "k_proj", "v_proj", "o_proj" if biases else "out_proj", "gate_proj", "up_proj", "down_proj"]
    earlier = order[: order.index(short.rpartition(".")[2]) - (short == "mlp.up_proj")]
    put(full, model, QuantizedLayer({name: q for name, q in second.items() if name.rpartition(".")[2] in earlier}))
    norm = {"o": "input_layernorm", "out": "input_layernorm", "down": "post_attention_layernorm"}.get(
        short.rpartition(".")[2].removesuffix("_proj")
    )
    name = f"model.layers.1.{short}"
    seen, blind = Moments(full=True), Moments(full=True)
    linear = source.get_submodule(name)
    assert (linear.bias is not None) == biases
    for (x, stream), (other, there) in zip(*(observed(each, name, norm) for each in (full, source)), strict=True):
        with torch.no_grad():
            given = linear(other) - (0 if linear.bias is None else linear.bias)
        lacks = None if norm is None else there - stream
        seen.add(x, other if norm is None else None, wanted=None if lacks is None else lacks + given)
        blind.add(x, other)
    weight, grid = model.checkpoint.read(f"{name}.weight").bfloat16(), Grid(32)
    expected, without = (choose(weight, grid, ["gptq"], each.inputs()).quantized for each in (seen, blind))
    assert torch.equal(second[name].codes, expected.codes)
    assert torch.equal(second[name].codes, without.codes) == (norm is None)


@torch.no_grad()
def observed(full: Any, linear: str, norm: str | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What a linear, and a norm of its layer, read in the whole model, batch by batch."""
    modules = [full.get_submodule(linear), full.get_submodule(f"model.layers.1.{norm}" if norm else linear)]
    read: list[list[torch.Tensor]] = [[], []]
    hooks = [
        m.register_forward_pre_hook(lambda _, x, to=to: to.append(x[0])) for m, to in zip(modules, read, strict=True)
    ]
    for batch in batches(WINDOWS):
        full(batch, use_cache=False)
    for hook in hooks:
        hook.remove()
    return list(zip(*read, strict=True))


@torch.no_grad()
def full_moments(full: Any, module: str) -> torch.Tensor:
    """Second moments of a module's input in the whole model."""
    inputs: list[torch.Tensor] = []
    hook = full.get_submodule(module).register_forward_pre_hook(lambda _, x: inputs.append(x[0].float().flatten(0, 1)))
    for batch in batches(WINDOWS):
        full(batch, use_cache=False)
    hook.remove()
    return torch.cat(inputs).square().mean(0)


def test_the_head_sees_the_quantised_model(model: OpenedModel, tmp_path: Path) -> None:
    results = run(model, recipe(model), tmp_path / "results")
    full = load_model(model.checkpoint, torch.bfloat16)
    for index in range(LAYERS):
        put(full, model, results.load(index))
    moments = full_moments(full, "lm_head")
    head = results.load(LAYERS).linears["lm_head"]
    assert torch.equal(head.codes, search(full.lm_head.weight.float(), Grid(32), moments).codes)


@torch.no_grad()
def put(full: Any, model: OpenedModel, layer: QuantizedLayer) -> None:
    """Replaces the quantised linears' weights by what their codes stand for."""
    for linear in model.linears:
        if linear.name in layer.linears:
            weight = full.get_submodule(linear.module).weight
            weight[linear.start : linear.stop] = layer.linears[linear.name].dequantize()


@pytest.mark.parametrize(("method", "windows"), [("search", None), ("rtn", None), ("rtn", WINDOWS)])
def test_without_windows_or_moments_each_weight_stands_for_itself(
    model: OpenedModel, tmp_path: Path, method: str, windows: torch.Tensor | None
) -> None:
    results = run(model, recipe(model, method, zero="integer"), tmp_path / "results", windows)
    choose: Callable[..., Any] = {"search": search, "rtn": round_to_nearest}[method]
    for linear in model.linears:
        name = "model.embedding" if linear.layer is None else linear.module
        rows = model.checkpoint.read(f"{name}.weight")[linear.start : linear.stop]
        found = results.load(LAYERS if linear.layer is None else linear.layer)
        expected = choose(rows, Grid(32, "integer"))
        assert torch.equal(found.linears[linear.name].dequantize(), expected.dequantize())
        assert found.errors[linear.name] == pytest.approx(error(rows, expected))
    assert not [name for name in files(tmp_path / "results") if name.startswith("hidden")]


def test_skipped_linears_keep_their_weights(model: OpenedModel, tmp_path: Path) -> None:
    everything = run(model, recipe(model, skip="layers.0."), tmp_path / "a")
    assert everything.load(0).linears == {}
    replay = Replay(model.checkpoint, torch.bfloat16)
    hidden = replay.embed(batches(WINDOWS))
    with replay.layer(0) as layer:
        hidden = [replay.run(layer, 0, h) for h in hidden]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        killed_at(patch, 0, "after")
        run(model, recipe(model, skip="layers.0."), tmp_path / "b")
    assert all(torch.equal(x, y) for x, y in zip(Results(tmp_path / "b").load_hidden(1).quantized, hidden, strict=True))
    part = run(model, recipe(model, skip="self_attn"), tmp_path / "c")
    assert {name.rpartition(".")[2] for name in part.load(2).linears} == {"gate_proj", "up_proj", "down_proj"}
    assert run(model, recipe(model, skip="lm_head"), tmp_path / "d").load(LAYERS).linears == {}


@pytest.mark.parametrize(
    ("tensor", "index", "value"),
    [
        ("model.layers.2.mlp.up_proj.weight", (7, 5), float("nan")),
        ("model.layers.1.self_attn.q_k_v_proj.weight", (200, 0), float("inf")),
        ("model.embedding.weight", (511, 127), float("-inf")),
    ],
)
def test_a_weight_that_is_not_finite_is_named_with_its_index(
    tmp_path: Path, tensor: str, index: tuple[int, int], value: float
) -> None:
    folder = tiny_checkpoint(tmp_path / "model", "spark2_5")
    tensors = load_file(folder / "model.safetensors")
    tensors[tensor][index] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = open_model(Folder(folder, name="org/model"))
    expected = (
        rf"^org/model: {tensor}: expected finite weights, found {value} at \[{index[0]}, {index[1]}\] \(1 in all\)$"
    )
    with pytest.raises(BadInput, match=expected):
        run(model, recipe(model, "rtn"), tmp_path / "results", None)


def test_batches_hold_all_windows_in_order() -> None:
    assert [batch.shape[0] for batch in batches(WINDOWS)] == [2, 2, 1]
    assert torch.equal(torch.cat(batches(WINDOWS)), WINDOWS)
    assert [batch.shape[0] for batch in batches(tokens(3, 100))] == [1, 1, 1]


@pytest.mark.parametrize("zero", ["none", "float", "integer"])
def test_a_saved_layer_comes_back_whole(tmp_path: Path, zero: Any) -> None:
    results = Results(tmp_path)
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    layer = QuantizedLayer({"a.b": round_to_nearest(weight, Grid(32, zero))}, {"a.b": 0.125}, {"a.b": "worse"})
    layer.tensors["a.norm.weight"], layer.reasons["a.norm.weight"] = torch.randn(7), "trained"
    hidden = Hidden(*([torch.full((2, 3, 4), i + part) for i in range(12)] for part in (0.0, 0.5)))
    results.save(3, layer, hidden)
    found, states = results.load(3), results.load_hidden(4)
    assert (found.errors, found.fallbacks, found.reasons) == (layer.errors, layer.fallbacks, layer.reasons)
    assert found.linears["a.b"].grid == Grid(32, zero)
    assert torch.equal(found.linears["a.b"].dequantize(), layer.linears["a.b"].dequantize())
    assert results.changes(3) == layer.reasons
    for value in (found.tensors["a.norm.weight"], results.read_changed(3, "a.norm.weight")):
        assert torch.equal(value, layer.tensors["a.norm.weight"])
    for ours, theirs in ((states.quantized, hidden.quantized), (states.reference, hidden.reference)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert results.done(3) and not results.done(2) and results.first_missing(4) == 0


def test_a_save_that_fails_leaves_no_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("calibrate.results.sync", full)
    with pytest.raises(OSError, match="No space"):
        Results(tmp_path).save(0, QuantizedLayer({}, {}))
    assert list(tmp_path.iterdir()) == []
