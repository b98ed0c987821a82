"""Parts of a layer that are kept instead of run again: the same bytes, fewer runs, and only where they hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from calibrate import links
from calibrate.finished import Finished
from calibrate.fisher import measure
from calibrate.grid import Grid
from calibrate.quantize import Recipe, quantize
from calibrate.results import Results
from models.checkpoint import Folder
from models.opened import OpenedModel, open_model
from tests.helpers import MODEL_TYPES, tiny_checkpoint, tokens

WINDOWS = tokens(5, 24)


@pytest.fixture(autouse=True)
def several_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two windows a batch, so that the last one is smaller."""
    monkeypatch.setattr("calibrate.replay.BATCH_TOKENS", 48)


def quantized(model: OpenedModel, method: tuple[str, ...], folder: Path, skip: str = "-") -> dict[str, bytes]:
    """The layers' files, by name."""
    grids = tuple((linear.name, Grid(32)) for linear in model.linears if skip not in linear.name)
    fisher = None
    if "fisher" in method:
        (folder / "fisher").mkdir(parents=True)
        fisher = measure(model.checkpoint, model.linears, torch.bfloat16, WINDOWS, folder / "fisher")
    recipe = Recipe(grids, method, torch.bfloat16)
    quantize(model.checkpoint, model.linears, recipe, WINDOWS, Results(folder / "layers"), fisher=fisher)
    return {file.name: file.read_bytes() for file in (folder / "layers").iterdir()}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize(
    "method", [("search",), ("fisher", "gptq", "refine"), ("awq", "gptq"), ("awq", "search", "refine")]
)
def test_what_is_kept_is_to_the_bit_what_another_run_would_give(
    model_type: str, method: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(Folder(tiny_checkpoint(tmp_path / "model", model_type)))
    if model.family.links is None and "awq" in method:
        pytest.skip("a family without links has no awq")
    short = quantized(model, method, tmp_path / "short")
    monkeypatch.setattr(Finished, "keep", lambda *_: None)
    assert quantized(model, method, tmp_path / "long") == short


@pytest.mark.parametrize("skip", ["o_proj", "down_proj", "up_proj", "q_proj"])
def test_linears_that_stay_as_they_are_change_nothing_of_that(
    skip: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(Folder(tiny_checkpoint(tmp_path / "model", "llama", num_hidden_layers=2)))
    short = quantized(model, ("gptq",), tmp_path / "short", skip)
    monkeypatch.setattr(Finished, "keep", lambda *_: None)
    assert quantized(model, ("gptq",), tmp_path / "long", skip) == short


def test_attention_and_mlp_run_once_for_each_window_beside_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_model(Folder(tiny_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)))
    runs: Counter[str] = Counter()
    forward = nn.Linear.forward

    def counted(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        runs[f"{linear.in_features} to {linear.out_features}"] += x.shape[:-1].numel()
        return forward(linear, x)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    monkeypatch.setattr("models.wide.WideLinear.forward", counted)
    quantized(model, ("gptq",), tmp_path / "run")
    # The source's layer and the quantised one, and once more the first batch of two windows, which shows that it holds.
    assert runs["256 to 128"] == 2 * WINDOWS.numel() + 2 * 24
    assert runs["128 to 256"] == 2 * runs["256 to 128"]


@pytest.mark.parametrize(("accepted", "later"), [(True, False), (False, False), (False, True)])
def test_attention_runs_no_more_behind_its_own_last_linear_where_channels_are_smoothed(
    accepted: bool, later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only for the inputs of that linear, once more where smoothing has changed them; and for every group behind it
    where a later link may change it."""
    model = open_model(Folder(tiny_checkpoint(tmp_path / "model", "llama", num_hidden_layers=1)))
    search = links.smoothing
    monkeypatch.setattr(
        links, "smoothing", lambda *a, **k: replace(search(*a, **k), before=1.0, after=0.0 if accepted else 2.0)
    )
    if later:
        monkeypatch.setattr(links.Smoother, "changes", lambda *_: ("self_attn.v_proj",))
    runs = 0
    attention = torch.nn.functional.scaled_dot_product_attention

    def counted(query: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        nonlocal runs
        runs += query.shape[0] * query.shape[2]
        return attention(query, *arguments, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    quantized(model, ("awq", "gptq"), tmp_path / "run")
    # The source's layer and the quantised one, and the first batch of two windows once more, which shows that it holds.
    assert runs == (5 if later else 3 if accepted else 2) * WINDOWS.numel() + 2 * 24


def returned(given: str, y: torch.Tensor) -> object:
    """What a part makes of its last linear's output."""
    ways = {"itself": y, "twice": 2 * y, "pair": (y, None), "both": (y, y), "flat": y.flatten(), "named": {"y": y}}
    return ways[given]


@pytest.mark.parametrize(
    ("given", "holds"),
    [("itself", True), ("pair", True), ("twice", False), ("both", False), ("flat", False), ("named", False)],
)
def test_only_a_part_that_hands_on_its_last_linears_output_is_kept(given: str, holds: bool) -> None:
    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> object:
            nonlocal runs
            runs += 1
            return returned(given, self.last(x))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: torch.Tensor) -> object:
            return self.part(x)

    runs, layer, batches = 0, Whole(), [torch.randn(2, 4), torch.randn(3, 4)]
    expected = [layer(x) for x in batches]
    finished = Finished(layer)
    finished.keep("part.last", list(batches), lambda: layer(batches[0]))
    before = runs
    for batch, x in enumerate(batches):
        with finished.standing_in(batch):
            given_now = layer(x)
        wanted = expected[batch]
        if isinstance(wanted, torch.Tensor):
            assert isinstance(given_now, torch.Tensor) and torch.equal(given_now, wanted)
        elif isinstance(wanted, tuple) and holds:
            assert isinstance(given_now, tuple) and torch.equal(given_now[0], wanted[0]) and given_now[1] is None
    assert runs - before == (0 if holds else len(batches))
    # Behind the block the part runs again.
    layer(batches[0])
    assert runs - before == (1 if holds else len(batches) + 1)


@pytest.mark.parametrize(
    ("module", "later", "ends"),
    [
        ("self_attn.o_proj", ["mlp.gate_proj", "mlp.down_proj"], True),
        ("self_attn.q_proj", ["self_attn.o_proj", "mlp.gate_proj"], False),
        ("mlp.down_proj", [], True),
        ("mlp.gate_proj", ["mlp.down_proj"], False),
    ],
)
def test_a_part_is_finished_behind_the_last_of_its_linears(module: str, later: list[str], ends: bool) -> None:
    assert Finished.ends_part(module, later) == ends
