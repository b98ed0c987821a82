"""Measuring artifacts: the engine's arithmetic beside the expanded weights, and what happens when it cannot run."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from calibrate.text import Windows
from export.artifact import Artifact, Expansion
from models.checkpoint import Folder, View
from models.errors import BadInput
from models.opened import open_model
from tests.helpers import tiny_checkpoint, tokens
from tests.workshop import FUSED, Workshop, spec
from validate.kernels import W4A8Linear
from validate.measure import Measurement, Settings, measure, measure_reference
from validate.score import SNR_LIMIT_DB, final_hidden
from validate.swap import UnsuitedKernelError, kernel_swap

COUNT, LENGTH, PROMPTS = 24, 48, 4


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {
        "windows": Windows(tokens(COUNT, LENGTH), COUNT, "0" * 64),
        "prompts": tokens(PROMPTS, 8, seed=1),
        "greedy_tokens": 5,
        "engine_windows": COUNT,
        "gates": {},
        "dtype": torch.bfloat16,
    }
    return Settings(**{**values, **changes})


def quiet(what: str, done: int, total: int) -> None:
    """Nobody watches."""


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


def measured(workshop: Workshop, caches: Path, case: str, artifact: Artifact, how: Settings) -> Measurement:
    checkpoint = workshop.model(case).checkpoint
    cache = caches / f"{case}-{how.dtype}-{len(how.windows.ids)}"
    cache.mkdir(exist_ok=True)
    reference = measure_reference(checkpoint, how, cache, quiet)
    return measure(artifact, checkpoint, reference, how, quiet)


@pytest.fixture(scope="module")
def gptq(workshop: Workshop, caches: Path) -> Measurement:
    artifact = workshop.built("llama-tied", spec("gptq")).artifact
    return measured(workshop, caches, "llama-tied", artifact, settings())


def test_a_measurement_holds_scores_greedy_and_engine(gptq: Measurement) -> None:
    assert gptq.scores.perplexity > 1 and gptq.scores.kl > 0 and 0 < gptq.scores.top1 < 1
    assert gptq.scores.tokens == COUNT * (LENGTH - 1)
    assert gptq.greedy["of"] == PROMPTS and gptq.greedy["tokens"] == 5
    assert gptq.greedy["identical"] == PROMPTS - len(gptq.greedy["divergences"])
    assert gptq.engine["name"].startswith("vLLM W4A8")


def test_eight_bit_activations_differ_from_weights_only_but_little(gptq: Measurement) -> None:
    assert gptq.engine["tokens"] == gptq.scores.tokens
    assert gptq.engine["perplexity"] != gptq.scores.perplexity
    assert 0 < gptq.engine["gap"] < 0.02
    assert gptq.engine["kl"] == pytest.approx(gptq.scores.kl, rel=0.05)
    assert gptq.engine["gap"] == pytest.approx(abs(gptq.engine["perplexity"] / gptq.scores.perplexity - 1), rel=1e-6)


@pytest.mark.parametrize("case", ["llama-tied", "qwen2-biases", "phi3", "spark2_5"])
@pytest.mark.parametrize("format", ["tinygemm", "awq"])
def test_the_int4_operator_agrees_with_the_expansion(workshop: Workshop, caches: Path, case: str, format: str) -> None:
    artifact = workshop.built(case, spec(format)).artifact
    found = measured(workshop, caches, case, artifact, settings())
    assert "int4 operator" in found.engine["name"]
    # They round differently, and random weights amplify that: a wrong scale or zero would change all of this.
    assert found.engine["gap"] < 0.005
    assert found.engine["kl"] == pytest.approx(found.scores.kl, rel=0.01)


@pytest.mark.parametrize("case", FUSED)
def test_split_and_fused_artifacts_measure_the_same(workshop: Workshop, caches: Path, case: str) -> None:
    split, fused = (
        measured(workshop, caches, case, workshop.built(case, spec("gptq", fused=fused)).artifact, settings())
        for fused in (False, True)
    )
    assert split == fused


def test_the_engine_may_be_scored_on_fewer_windows(workshop: Workshop, caches: Path, gptq: Measurement) -> None:
    artifact = workshop.built("llama-tied", spec("gptq")).artifact
    fewer = measured(workshop, caches, "llama-tied", artifact, settings(engine_windows=2))
    assert fewer.scores == gptq.scores
    assert fewer.engine["tokens"] == 2 * (LENGTH - 1)
    # Against the same windows of the expansion, not against all: windows 0 and 12 are the evenly spread ones.
    expected = sum(gptq.scores.nll[i] for i in (0, 12)) / 2
    engine = torch.tensor(fewer.engine["perplexity"]).double().log()
    added = float((engine - expected).exp())
    assert fewer.engine["gap"] == pytest.approx(abs(added - 1), rel=1e-3)
    assert gptq.engine["ratio_on_all"] == pytest.approx(gptq.engine["perplexity_ratio"], rel=1e-9)
    assert gptq.engine["ratio_on_all_se"] == gptq.engine["perplexity_ratio_se"]
    # What the engine adds there is told of all tokens, with the errors of both.
    assert fewer.engine["ratio_on_all"] == pytest.approx(gptq.scores.perplexity_ratio * added, rel=1e-6)
    assert fewer.engine["ratio_on_all_se"] > gptq.scores.perplexity_ratio_se


def skipped(workshop: Workshop, caches: Path, artifact: Artifact, **changes: Any) -> str:
    engine = measured(workshop, caches, "llama-tied", artifact, settings(**changes)).engine
    assert engine.keys() == {"name", "skipped"}
    return str(engine["skipped"])


def test_an_engine_that_is_not_wanted_is_not_run(workshop: Workshop, caches: Path) -> None:
    artifact = workshop.built("llama-tied", spec("gptq")).artifact
    assert skipped(workshop, caches, artifact, engine_windows=0) == "validation: engine: false"


def test_an_engine_that_computes_in_another_dtype_says_so(workshop: Workshop, caches: Path) -> None:
    artifact = workshop.built("llama-tied", spec("gptq")).artifact
    reason = skipped(workshop, caches, artifact, dtype=torch.float32, windows=settings().windows)
    assert reason == "the kernel computes in bfloat16, the model in torch.float32"


def test_a_kernel_that_does_not_take_a_group_says_which(tmp_path: Path) -> None:
    # A row of 384 is a group that AWQ may have and the operator does not take.
    own = Workshop(tmp_path)
    own._models["llama-tied"] = open_model(Folder(tiny_checkpoint(tmp_path / "wide", intermediate_size=384)))
    artifact = own.built("llama-tied", spec("awq", group_size=-1)).artifact
    reason = skipped(own, tmp_path, artifact)
    assert "model.layers.0.mlp.down_proj" in reason and "group size 384: the operator takes" in reason


def test_a_head_that_the_kernel_refuses_is_a_reason_too(
    workshop: Workshop, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky(W4A8Linear):
        def __init__(self, q: Any, bias: torch.Tensor | None = None) -> None:
            if q.codes.shape[0] > 256:
                raise BadInput("too many rows")
            super().__init__(q, bias)

    monkeypatch.setattr("validate.measure.ENGINES", {"gptq": ("picky", Picky)})
    artifact = workshop.built("llama-tied", spec("gptq")).artifact
    assert skipped(workshop, caches, artifact) == "lm_head: too many rows"


def test_the_swap_covers_exactly_the_quantised_linears(workshop: Workshop) -> None:
    built = workshop.built("spark2_5", spec("gptq", quantize_head=False, skip=("mlp.down_proj",)))
    swap = kernel_swap(built.artifact, Expansion(built.artifact), W4A8Linear, torch.bfloat16)
    assert isinstance(swap("model.layers.0.self_attn.q_k_v_proj"), W4A8Linear)
    for name in ("model.layers.0.mlp.down_proj", "model.layers.0.self_attn.g_proj", "lm_head", "model.norm"):
        assert swap(name) is None, name
    unsuited = kernel_swap(built.artifact, Expansion(built.artifact), W4A8Linear, torch.float16)
    with pytest.raises(UnsuitedKernelError):
        unsuited("model.layers.0.self_attn.q_k_v_proj")


def test_a_measurement_survives_json(gptq: Measurement) -> None:
    assert Measurement.from_dict(json.loads(json.dumps(gptq.to_dict()))) == gptq


def test_the_reference_is_scored_once(workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, how = workshop.model("llama-tied").checkpoint, settings()
    first = measure_reference(checkpoint, how, tmp_path, quiet)
    monkeypatch.setattr("validate.measure.final_hidden", lambda *_, **__: pytest.fail("scored again"))
    second = measure_reference(checkpoint, how, tmp_path, quiet)
    assert torch.equal(first.hidden, second.hidden)
    assert torch.equal(first.continuations.tokens, second.continuations.tokens)
    assert [path.name for path in tmp_path.iterdir()] == ["reference.safetensors"]


def test_a_reference_that_overflows_is_refused(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = workshop.model("llama-tied").checkpoint
    read = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda name: read(name) * (1e6 if "down_proj" in name else 1))
    with pytest.raises(BadInput, match="hidden states are not finite in float16: set another `model.dtype`"):
        measure_reference(checkpoint, settings(dtype=torch.float16), tmp_path, quiet)
    assert list(tmp_path.iterdir()) == []


def test_settings_key_changes_with_what_decides_the_reference() -> None:
    base = settings()
    other = Windows(tokens(COUNT, LENGTH, seed=5), COUNT, "0" * 64)
    changed = [
        replace(base, windows=other),
        replace(base, prompts=base.prompts + 1),
        replace(base, greedy_tokens=6),
        replace(base, dtype=torch.float32),
    ]
    assert base.key() not in [change.key() for change in changed]
    assert base.key() == replace(base, gates={"max_kl": 1.0}, engine_windows=1).key()


def test_an_unquantised_copy_has_lost_nothing(workshop: Workshop, caches: Path, tmp_path: Path) -> None:
    """An artifact whose expansion is the source itself: ratio 1, nothing else lost."""
    artifact = Artifact(shutil.copytree(workshop.built("llama-tied", spec("gptq")).artifact.folder, tmp_path / "gptq"))
    model = workshop.model("llama-tied")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("validate.measure.expansion_of", lambda _: View(model.checkpoint))
        found = measured(workshop, caches, "llama-tied", artifact, settings(engine_windows=0))
    assert found.scores.perplexity_ratio == 1 and found.scores.snr_db == SNR_LIMIT_DB
    assert found.greedy["identical"] == PROMPTS and found.greedy["divergences"] == []


def test_hidden_states_do_not_depend_on_how_windows_are_batched(workshop: Workshop) -> None:
    checkpoint, ids = workshop.model("spark2_5").checkpoint, tokens(4, 24)
    together = final_hidden(checkpoint, ids, torch.float32)
    apart = torch.cat([final_hidden(checkpoint, row[None], torch.float32) for row in ids])
    assert torch.allclose(together, apart, atol=1e-4, rtol=1e-4)
