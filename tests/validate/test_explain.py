"""Which layer hurts: restoration and attribution against independent computations, and advice that a run accepts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from calibrate.quantize import quantize
from calibrate.replay import Replay
from calibrate.results import Results
from calibrate.rewrites import rewritten
from convert.prepare import to_spec
from convert.target import Target
from export.artifact import Artifact, Expansion, write
from export.ledger import Ledger
from export.plan import make_plan
from models.checkpoint import Checkpoint, Folder
from models.errors import BadInput
from models.opened import OpenedModel, open_model
from tests.helpers import Changed, tiny_checkpoint, tokens
from tests.workshop import Built, Workshop, spec
from validate.advice import Skip, choose, patterns, to_yaml
from validate.explain import Checked, explain
from validate.explain_picture import draw
from validate.restore import Restoration, restored_kl
from validate.score import compare, final_hidden
from validate.sensitivity import attribute

IDS = tokens(6, 32)
CASES = [
    ("llama-untied", "gptq", True),
    ("llama-tied", "gptq", True),
    ("phi3", "awq", False),
    ("spark2_5", "tinygemm", True),
]


def quiet(*_: Any) -> None:
    """Nobody watches."""


def kl(source: Checkpoint, other: Checkpoint, dtype: torch.dtype = torch.bfloat16) -> float:
    hidden = final_hidden(source, IDS, dtype)
    return compare(source, hidden, other, final_hidden(other, IDS, dtype), IDS, dtype).kl


@pytest.mark.parametrize("case, format, head", CASES)
def test_restoring_parts_is_what_a_checkpoint_of_both_gives(
    workshop: Workshop, case: str, format: str, head: bool
) -> None:
    built = workshop.built(case, spec(format, quantize_head=head))
    model, expansion = built.model, Expansion(built.artifact)
    source = model.checkpoint
    rows = {x.name: x for x in model.linears}
    value = rows["model.layers.0.self_attn.v_proj"]
    down = rows["model.layers.1.mlp.down_proj"]

    def with_layer(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return source.read(name) if name.startswith("model.layers.1.") else tensor

    def with_linears(name: str, tensor: torch.Tensor) -> torch.Tensor:
        for linear in (value, down):
            if name == f"{linear.module}.weight":
                tensor = tensor.clone()
                tensor[linear.start : linear.stop] = source.read(name)[linear.start : linear.stop]
        return tensor

    wanted = [
        Restoration(),
        Restoration(layers=frozenset([1])),
        Restoration(linears=frozenset([value.name, down.name])),
        Restoration(layers=frozenset(range(model.dimensions.layers)), head=True),
        Restoration(head=True),
    ]
    hidden = final_hidden(source, IDS, torch.bfloat16)
    found = restored_kl(model, expansion, hidden, IDS, wanted, torch.bfloat16, quiet)
    assert found[0] == pytest.approx(kl(source, expansion), rel=1e-6)
    assert found[1] == pytest.approx(kl(source, Changed(expansion, with_layer)), rel=1e-6)
    assert found[2] == pytest.approx(kl(source, Changed(expansion, with_linears)), rel=1e-6)
    assert found[3] == 0
    assert (found[4] != found[0]) == head


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> tuple[OpenedModel, Changed]:
    """A model, and a copy whose matrices differ a little."""
    model = open_model(Folder(tiny_checkpoint(tmp_path_factory.mktemp("near"), "spark2_5", num_hidden_layers=2)))
    linears = {f"{linear.module}.weight" for linear in model.linears}

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name)))
        return tensor.float() * (1 + 0.01 * noise) if name in linears else tensor.float()

    return model, Changed(Changed(model.checkpoint, lambda _, tensor: tensor.float()), change)


def test_the_parts_sum_to_the_divergence(near: tuple[OpenedModel, Changed]) -> None:
    model, other = near
    hidden = final_hidden(model.checkpoint, IDS, torch.float32)
    parts = attribute(model, other, hidden, IDS, torch.float32, quiet)
    assert set(parts) == {linear.name for linear in model.linears}
    assert sum(parts.values()) == pytest.approx(kl(model.checkpoint, other, torch.float32), rel=0.02)


def test_a_part_is_the_derivative_half_way_along_its_change(near: tuple[OpenedModel, Changed]) -> None:
    model, other = near
    source, hidden = model.checkpoint, final_hidden(model.checkpoint, IDS, torch.float32)
    parts = attribute(model, other, hidden, IDS, torch.float32, quiet)
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        linear = next(x for x in model.linears if x.name == name)
        rows = slice(linear.start, linear.stop)

        def moved(step: float, linear: Any = linear, rows: slice = rows) -> float:
            def change(tensor_name: str, tensor: torch.Tensor) -> torch.Tensor:
                first, last = source.read(tensor_name).float(), other.read(tensor_name)
                tensor = (first + last) / 2
                if tensor_name == f"{linear.module}.weight":
                    tensor[rows] += step * (last - first)[rows]
                return tensor

            return kl(source, Changed(source, change), torch.float32)

        assert parts[name] == pytest.approx(moved(0.5) - moved(-0.5), rel=0.02)


def damaged(built: Built, monkeypatch: pytest.MonkeyPatch, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Lets `explain` read other weights than the artifact's."""

    class Damaged(Expansion):
        def read(self, name: str) -> torch.Tensor:
            return change(name, super().read(name))

    monkeypatch.setattr("validate.explain.Expansion", Damaged)


def test_a_damaged_linear_comes_first_and_the_advice_is_to_leave_it(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = workshop.built("llama-untied", spec("tinygemm"))
    bad = "model.layers.0.mlp.down_proj"

    def noisy(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name != f"{bad}.weight":
            return tensor
        return tensor + 0.3 * tensor.std() * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))

    damaged(built, monkeypatch, noisy)
    found = explain(built.model, built.artifact, IDS, Checked(linears=3), 0.0, quiet)
    assert found["linears"][0]["name"] == bad and found["rewritten"] == []
    assert min(layer["restored"] for layer in found["layers"]) > 0
    assert [linear["restored"] is not None for linear in found["linears"] if linear["name"] != "lm_head"][:4] == [
        *[True] * 3,
        False,
    ]
    (skip,) = [entry for entry in found["advice"] if "skip" in entry["change"]]
    assert skip["change"] == {"skip": [bad]} and skip["measured"]
    assert skip["kl"] == pytest.approx(found["linears"][0]["restored"])
    assert found["check"]["correlation"] > 0.9


def test_as_many_layers_are_restored_as_are_asked_for_the_worst_first(workshop: Workshop, tmp_path: Path) -> None:
    built = workshop.built("llama-untied", spec("gptq"))
    every, one = (explain(built.model, built.artifact, IDS, Checked(count, 0), 0.1, quiet) for count in (2, 1))
    assert all(layer["restored"] is not None for layer in every["layers"])
    worst = max(range(2), key=lambda layer: every["layers"][layer]["attributed"])
    expected = [layer["restored"] if index == worst else None for index, layer in enumerate(every["layers"])]
    assert [layer["restored"] for layer in one["layers"]] == expected
    assert [layer["attributed"] for layer in one["layers"]] == [layer["attributed"] for layer in every["layers"]]
    # The picture leaves the other's bar out.
    draw(one, tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


def test_rewritten_layers_are_compared_as_a_whole_only(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    built = workshop.built("llama-untied", spec("gptq"))

    def folded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name == "model.layers.1.input_layernorm.weight":
            return tensor * 2
        if name.startswith("model.layers.1.self_attn.") and name[25] in "qkv":
            return tensor / 2
        return tensor

    plain = explain(built.model, built.artifact, IDS, Checked(linears=2), 0.1, quiet)
    damaged(built, monkeypatch, folded)
    found = explain(built.model, built.artifact, IDS, Checked(linears=2), 0.1, quiet)
    assert found["rewritten"] == ["model.layers.1"]
    assert found["layers"][1]["attributed"] is None
    assert found["layers"][1]["restored"] == pytest.approx(plain["layers"][1]["restored"], rel=0.1)
    assert not [linear for linear in found["linears"] if linear["name"].startswith("model.layers.1.")]
    # It has no part, so it is measured in any case.
    none = explain(built.model, built.artifact, IDS, Checked(0, 0), 0.1, quiet)
    assert [layer["restored"] for layer in none["layers"]] == [None, pytest.approx(found["layers"][1]["restored"])]


@pytest.mark.parametrize("rewrite", ["fold", "rotate"])
def test_rewritten_models_are_explained_in_the_weights_that_were_quantised(
    workshop: Workshop, tmp_path: Path, rewrite: str
) -> None:
    target, model = spec("gptq", method=(rewrite, "rtn")), workshop.model("llama-tied")
    view = rewritten(model, target.method, torch.bfloat16, values=True).checkpoint
    plan = make_plan(target, view, model.family, model.linears, torch.bfloat16)
    results = Results(tmp_path / "results")
    quantize(view, model.linears, plan.recipe, None, results)
    ledger = Ledger({"name": "x", "files": {}}, vars(target), (), [], {}, view.config, "bfloat16")
    write(plan, view, results, model.dimensions.layers, tmp_path / "gptq", ledger, 2**30)
    artifact = Artifact(tmp_path / "gptq")
    found = explain(model, artifact, IDS, Checked(linears=2), 0.1, quiet)
    assert found["rewritten"] == [] and len(found["linears"]) == len(model.linears)
    assert found["kl"] == pytest.approx(kl(view, Expansion(artifact)), rel=1e-6)
    assert found["check"]["correlation"] > 0.8
    methods = [entry["change"]["method"] for entry in found["advice"] if "method" in entry["change"]]
    assert methods == [[rewrite, "search"]]


def test_hidden_states_that_no_method_turned_so_are_refused(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = workshop.built("llama-untied", spec("gptq"))
    damaged(built, monkeypatch, lambda name, tensor: tensor.flip(-1) if "embed" in name else tensor)
    with pytest.raises(BadInput, match=r"model.embed_tokens.weight is not the source's, in the weights"):
        explain(built.model, built.artifact, IDS, Checked(linears=2), 0.1, quiet)


@pytest.mark.parametrize("case, format, head", CASES)
def test_every_advised_target_can_be_run(workshop: Workshop, case: str, format: str, head: bool) -> None:
    built = workshop.built(
        case, spec(format, quantize_head=head, group_size=128, isa="avx2" if format == "tinygemm" else "")
    )
    found = explain(built.model, built.artifact, IDS, Checked(linears=1), 3.0, quiet)
    changes = [entry["change"] for entry in found["advice"]]
    assert {"method": ["search"]} in changes and {"group_size": 32} in changes
    for entry in found["advice"]:
        (written,) = YAML(typ="safe").load(entry["yaml"])["targets"]
        target = Target.model_validate(written)
        plan = make_plan(
            to_spec(target), built.model.checkpoint, built.model.family, built.model.linears, torch.bfloat16
        )
        extra = entry["extra_bits_per_weight"]
        if "skip" not in entry["change"]:
            assert plan.bits_per_weight - built.plan.bits_per_weight == pytest.approx(extra)
        else:
            # Skipped linears are in the plan's mean; a head that is kept as a head is not.
            head = built.plan.weights - plan.counted
            assert (head > 0) == ("lm_head" in entry["change"])
            bits = 16 * head + plan.bits_per_weight * plan.counted - built.plan.bits_per_weight * built.plan.weights
            assert bits / built.plan.weights == pytest.approx(extra)


def test_what_costs_nothing_comes_first(workshop: Workshop) -> None:
    built = workshop.built("llama-untied", spec("gptq"))
    found = explain(built.model, built.artifact, IDS, Checked(linears=0), 0.1, quiet)
    assert "gptq" in found["untried"]
    first = found["advice"][0]
    assert first["change"] == {"method": ["search"]} and first["extra_bits_per_weight"] == 0 and not first["measured"]
    # What rounding costs at all, the better method cannot buy back twice.
    assert 0 < first["kl"] < kl(built.model.checkpoint, Expansion(built.artifact))


candidates = st.lists(st.builds(Skip, st.just(("x",)), st.floats(0.001, 1), st.floats(1, 100)), min_size=1, max_size=20)


@given(candidates, st.floats(0, 5), st.integers(1, 100))
def test_the_budget_holds_for_all_but_a_first_one(found: list[Skip], budget: float, weights: int) -> None:
    chosen = choose(found, budget, weights)
    assert chosen[0] == found[0] and all(skip in found for skip in chosen)
    assert len(chosen) == 1 or sum(skip.extra_bits for skip in chosen) <= budget * weights * (1 + 1e-9)


def test_a_whole_layer_is_one_pattern_and_the_head_is_none(workshop: Workshop) -> None:
    family = workshop.model("llama-tied").family
    whole = Skip(tuple(f"model.layers.0.{name}" for name in family.linears), 1, 1)
    some = Skip(("model.layers.11.mlp.down_proj", "lm_head"), 1, 1)
    assert patterns([whole, some], family) == ["model.layers.0.*", "model.layers.11.mlp.down_proj"]


def test_a_yaml_keeps_what_the_target_says(workshop: Workshop) -> None:
    target = vars(replace(workshop.plan("llama-untied", spec("tinygemm", zero="none")).spec, skip=("mlp.up_proj",)))
    (written,) = YAML(typ="safe").load(to_yaml(target, ["mlp.down_proj"], group_size=64))["targets"]
    assert written["symmetric"] is True and "zero" not in written and written["group_size"] == 64
    assert written["skip"] == ["mlp.up_proj", "mlp.down_proj"] and written["lm_head"] == "quantize"


def test_replay_lets_gradients_through_only_where_they_are_asked_for(near: tuple[OpenedModel, Changed]) -> None:
    replay = Replay(near[0].checkpoint, torch.float32)
    (hidden,) = replay.embed([IDS])
    hidden.requires_grad_(True)
    with replay.layer(0) as layer:
        assert replay.forward(layer, 0, hidden).requires_grad and not replay.run(layer, 0, hidden).requires_grad
    with replay.end() as logits:
        assert not logits(IDS, hidden).requires_grad
    with replay.end(gradients=True) as logits:
        assert logits(IDS, hidden).requires_grad
