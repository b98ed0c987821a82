"""`awq` in a layer: the function stays, whatever the link, and what is committed holds all of it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate import links as module
from calibrate import quantize as quantizing
from calibrate.awq import Smoothing
from calibrate.coded import Coded
from calibrate.grid import Grid
from calibrate.links import Link, Smoother, divided_norm, divided_rows, link_of
from calibrate.quantize import Recipe, groups, quantize
from calibrate.replay import Replay
from calibrate.results import QuantizedLayer, Results
from calibrate.rewrite import scale_channels
from calibrate.search import round_to_nearest
from calibrate.statistics import Inputs
from calibrate.tune import Training, tune
from models.checkpoint import Folder
from models.opened import OpenedModel, open_model
from models.skeleton import load_model
from tests.helpers import tiny_checkpoint, tokens

WINDOWS = tokens(4, 24)
# Of the logarithms of random factors: enough to make another model where one of them is missing.
SPREAD = 0.5
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {}),
    "phi3": ("phi3", {}),
    "spark2_5": ("spark2_5", {"num_hidden_layers": 2}),
    "spark2_5-ungated": ("spark2_5", {"headwise_attn_output_gate": False, "num_hidden_layers": 2}),
}


def opened(folder: Path, case: str) -> OpenedModel:
    model_type, config = CASES[case]
    return open_model(Folder(tiny_checkpoint(folder, model_type, **config)))


def recipe(model: OpenedModel, *method: str, skip: str = "-", zero: str = "none", **options: Any) -> Recipe:
    grids = tuple((linear.name, Grid(32, zero)) for linear in model.linears if skip not in linear.name)  # type: ignore[arg-type]
    return Recipe(grids, method, torch.bfloat16, **options)


def run(model: OpenedModel, wanted: Recipe, folder: Path) -> Results:
    results = Results(folder)
    quantize(model.checkpoint, model.linears, wanted, WINDOWS, results)
    return results


def random_factors(*arguments: Any) -> Smoothing:
    """Stands in for the search: every link is taken, with factors of its own."""
    channel_of = arguments[4]
    generator = torch.Generator().manual_seed(len(channel_of))
    noise = torch.randn(int(channel_of.max()) + 1, generator=generator)
    return Smoothing(torch.exp(SPREAD * noise), 0.5, True, 1.0, 0.5)


@pytest.fixture
def any_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "smoothing", lambda *a, compensated: random_factors(*a))


@pytest.mark.usefixtures("any_factors")
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_the_function_of_a_layer_stays_the_same_before_anything_is_quantised(case: str, tmp_path: Path) -> None:
    model = opened(tmp_path, case)
    replay = Replay(model.checkpoint, torch.float32)
    (hidden,) = replay.embed([WINDOWS])
    prefix = "model.layers.1."
    smoother = Smoother(
        model.family, {x.name: x for x in model.linears}, ("awq", "rtn"), model.dimensions.head_dim, torch.float32
    )
    found = QuantizedLayer()
    with replay.layer(1) as layer:
        before = replay.run(layer, 1, hidden)
        linears = [linear for linear in model.linears if linear.layer == 1]
        for group in groups(model.family, prefix, linears):
            factors = smoother.smooth(layer, prefix, group, Grid(32), Inputs.alike(group[0].columns), found)
            assert factors is not None
            for linear in group:
                rows = layer.get_submodule(linear.module.removeprefix(prefix)).weight[linear.start : linear.stop]
                rows.copy_(rows * factors)
        after = replay.run(layer, 1, hidden)
        # Everything that stays unquantised stands in what is committed, as it is in the layer now.
        for name, value in found.tensors.items():
            assert torch.equal(value, layer.get_parameter(name.removeprefix(prefix))) and found.reasons[name]
    assert float((after - before).norm() / before.norm()) < 1e-5
    assert len(found.factors) == len(found.links) == 4
    gated = case == "spark2_5"
    assert (f"{prefix}self_attn.g_proj.weight" in found.tensors) == gated


@pytest.mark.usefixtures("any_factors")
@pytest.mark.parametrize(("case", "zero"), [("llama-biases", "float"), ("phi3", "none"), ("spark2_5", "integer")])
def test_what_is_committed_is_the_quantised_model_with_scaled_channels(case: str, zero: str, tmp_path: Path) -> None:
    """Against the rewrite that scales the channels of a whole checkpoint, with the factors that were committed."""
    model = opened(tmp_path / "model", case)
    results = run(model, recipe(model, "awq", "rtn", zero=zero), tmp_path / "results")
    layers = [results.load(index) for index in range(model.dimensions.layers + 1)]
    factors = {name: value for layer in layers for name, value in layer.factors.items()}
    assert len(factors) == 4 * model.dimensions.layers + 1 and "model.norm" in factors
    view = scale_channels(model, factors, torch.float32).checkpoint
    for layer in layers:
        for name, value in layer.tensors.items():
            expected = view.read(name)
            assert float((value.float() - expected).norm() / expected.norm()) < 2e-3, name
    for linear in model.linears:
        rows = view.read(f"{linear.module}.weight")[linear.start : linear.stop]
        expected = round_to_nearest(rows, Grid(32, zero)).dequantize(torch.float32)  # type: ignore[arg-type]
        layer = layers[-1 if linear.layer is None else linear.layer]
        found = layer.linears[linear.name].dequantize(torch.float32)
        # Scales are rounded to bf16 once more where a row was divided, and a code at a boundary may move by one.
        assert float((found - rows).norm()) == pytest.approx(float((expected - rows).norm()), rel=0.03), linear.name


@pytest.mark.usefixtures("any_factors")
def test_a_writer_that_is_not_quantised_is_divided_too(tmp_path: Path) -> None:
    model = opened(tmp_path / "model", "spark2_5")
    results = run(model, recipe(model, "awq", "rtn", skip="layers.0.mlp.up"), tmp_path / "a")
    name = "model.layers.0.mlp.up_proj"
    found = results.load(0)
    expected = scale_channels(model, found.factors, torch.float32).checkpoint.read(f"{name}.weight")
    # Multiplied behind the norm, then divided before `down_proj`: rounded to bf16 each time.
    assert float((found.tensors[f"{name}.weight"] - expected).norm() / expected.norm()) < 5e-3
    assert "divided" in found.reasons[f"{name}.weight"]


@pytest.mark.usefixtures("any_factors")
def test_tuning_starts_from_what_awq_left(tmp_path: Path) -> None:
    """Also from unquantised linears that read a divided norm; factors and links are carried on."""
    model = opened(tmp_path / "model", "spark2_5")
    results = run(model, recipe(model, "awq", "rtn"), tmp_path / "results")
    coded = Coded(model.checkpoint, model.linears, model.dimensions.layers, results, torch.bfloat16)
    held_out = WINDOWS[-1:]
    with torch.no_grad():
        expected, found = (
            torch.log_softmax(load_model(checkpoint, torch.bfloat16)(held_out, use_cache=False).logits.float(), -1)
            for checkpoint in (model.checkpoint, coded)
        )
    loss = float((expected.exp() * (expected - found)).sum(-1).mean())
    training = Training(tokens=24, every=4, rounds=1)
    tuned = tune(model.checkpoint, model.checkpoint, model.linears, torch.bfloat16, WINDOWS, results, training=training)
    assert float(re.findall(r"[0-9]+\.[0-9]+", tuned.note)[0]) == pytest.approx(loss, rel=0.05)
    layer = tuned.results.load(1)
    assert layer.factors.keys() == results.load(1).factors.keys() and len(layer.links) == 4
    assert "model.layers.1.self_attn.g_proj.weight" in layer.tensors


def test_a_link_is_taken_only_where_the_measured_error_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = opened(tmp_path / "model", "qwen2")
    worse = replace(random_factors(None, None, None, None, torch.arange(128)), before=0.5, after=0.5)
    monkeypatch.setattr(module, "smoothing", lambda *a, compensated: worse)
    results = run(model, recipe(model, "awq", "rtn"), tmp_path / "a")
    plain = run(model, recipe(model, "rtn"), tmp_path / "b")
    for index in range(model.dimensions.layers + 1):
        ours, theirs = results.load(index), plain.load(index)
        assert not ours.tensors and not ours.factors
        assert ours.links and not any(link["accepted"] for link in ours.links.values())
        for name, linear in ours.linears.items():
            assert torch.equal(linear.codes, theirs.linears[name].codes)


@pytest.mark.parametrize("method", [("awq", "gptq"), ("awq", "search")])
def test_a_killed_run_ends_with_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: tuple[str, ...]
) -> None:
    model = opened(tmp_path / "model", "spark2_5")
    wanted = recipe(model, *method, int8_inputs=True)
    run(model, wanted, tmp_path / "whole")
    save = quantizing.Results.save

    def killed(results: Results, index: int, *rest: Any) -> None:
        save(results, index, *rest)
        raise KeyboardInterrupt

    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(quantizing.Results, "save", killed)
            run(model, wanted, tmp_path / "killed")
    run(model, wanted, tmp_path / "killed")
    names = [path.name for path in sorted((tmp_path / "whole").iterdir())]
    assert names == [path.name for path in sorted((tmp_path / "killed").iterdir())]
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes()
    assert any(Results(tmp_path / "whole").load(index).factors for index in range(3))


def test_links_are_the_familys_data(tmp_path: Path) -> None:
    family = opened(tmp_path, "spark2_5").family
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    assert link_of(family, attention) == Link("input_layernorm", (*attention, "self_attn.g_proj"))
    assert link_of(family, ("self_attn.out_proj",)) == Link("self_attn.v_proj", ("self_attn.out_proj",))
    assert link_of(family, ("mlp.down_proj",)) == Link("mlp.up_proj", ("mlp.down_proj",))
    assert link_of(family, ("mlp.other",)) is None
    assert link_of(replace(family, links=None), attention) is None


def test_a_norm_is_divided_as_far_as_its_dtype_can_hold_it() -> None:
    weight = torch.tensor([1.0, 0.0, 6e-8, 60000.0], dtype=torch.float16)
    new, factors = divided_norm(weight, torch.tensor([3.0, 3.0, 8.0, 0.1]))
    assert torch.equal(new[1:], weight[1:]) and factors[1:].tolist() == [1, 1, 1]
    assert float(new[0]) * float(factors[0]) == pytest.approx(1.0, abs=1e-7) and float(factors[0]) != 3.0


@pytest.mark.parametrize("zero", ["none", "float", "integer"])
def test_divided_rows_keep_their_codes(zero: Any) -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    weight[2] *= 2.0**-120
    before = round_to_nearest(weight, Grid(32, zero))
    wanted = torch.tensor([0.5, 2.0, 2.0**20, 0.7, 1.0, 3.0])
    after, factors = divided_rows(before, wanted)
    assert torch.equal(after.codes, before.codes)
    # A scale that would be no normal number any more.
    assert factors.tolist() == [0.5, 2.0, 1.0, pytest.approx(0.7), 1.0, 3.0]
    expected = before.dequantize(torch.float32) / factors[:, None]
    difference = after.dequantize(torch.float32) - expected
    assert bool((difference.norm(dim=1) <= 2**-7 * expected.norm(dim=1)).all())
