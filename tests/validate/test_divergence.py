"""Near-tie or defect: rounding alone never makes a defect, a broken weight does, and both come with their text."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.checkpoint import Checkpoint, Folder
from models.skeleton import load_model
from tests.helpers import Changed, tiny_checkpoint, tiny_tokenizer, tokens
from validate.divergence import Verdict, classify, describe, judge, resolution, summary, to_dict, token_text
from validate.greedy import Continuations, Divergence, continue_greedily, divergences

STEPS = 24


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tiny_checkpoint(tmp_path_factory.mktemp("source"), "llama"))


def found_and_judged(
    source: Checkpoint, other: Checkpoint, dtypes: tuple[torch.dtype, torch.dtype]
) -> list[tuple[Divergence, Verdict]]:
    prompts = tokens(48, 8, seed=3)
    reference = continue_greedily(source, prompts, STEPS, dtypes[0])
    found = divergences(reference, continue_greedily(other, prompts, STEPS, dtypes[1]))
    return list(zip(found, classify(found, source, other, prompts, reference, dtypes[0]), strict=True))


@given(st.floats(-1e30, 1e30), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_the_resolution_is_the_distance_to_the_next_number(logit: float, dtype: torch.dtype) -> None:
    value = torch.tensor(abs(logit), dtype=torch.float64).clamp(torch.finfo(dtype).smallest_normal, 60000)
    power = 2.0 ** math.floor(math.log2(float(value)))
    assert float(torch.tensor(power, dtype=dtype) + torch.tensor(resolution(power, dtype), dtype=dtype)) > power
    assert torch.tensor(power, dtype=dtype) + torch.tensor(resolution(power, dtype) * 0.49, dtype=dtype) == power
    assert resolution(float(value), dtype) == resolution(-float(value), dtype) == resolution(power, dtype)


@given(st.floats(0, 10), st.floats(1e-3, 1), st.floats(-5, 5), st.floats(-5, 5))
def test_a_defect_is_what_neither_rounding_nor_fp32_explains(
    margin: float, step: float, ours: float, its: float
) -> None:
    verdict = judge(margin, step, ours, its, 0.1)
    assert (verdict.kind == "defect") == (margin > 2 * step and ours > 0 and its > 0)
    assert (verdict.because == "weights") == (verdict.kind == "defect")


@pytest.mark.parametrize(
    "numbers, because",
    [
        ((0.06, 0.03, 1.0, 1.0), "resolution"),
        ((0.07, 0.03, -0.1, 1.0), "reference"),
        ((0.07, 0.03, 0.1, 0.0), "artifact"),
        ((0.07, 0.03, 0.1, 0.1), "weights"),
        ((math.nan, 0.03, math.nan, math.nan), "weights"),
    ],
)
def test_the_rule_that_decided_is_named(numbers: tuple[float, float, float, float], because: str) -> None:
    assert judge(*numbers, noise=1).because == because


def test_the_same_weights_in_another_dtype_are_never_a_defect(source: Folder) -> None:
    judged = found_and_judged(source, source, (torch.bfloat16, torch.float32))
    assert len(judged) >= 3
    assert {verdict.kind for _, verdict in judged} == {"near-tie"}
    assert {verdict.noise for _, verdict in judged} == {0}


def test_weights_that_say_the_opposite_are_defects(source: Folder) -> None:
    def broken(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return -tensor if name.endswith("layers.1.mlp.down_proj.weight") else tensor

    judged = found_and_judged(source, Changed(source, broken), (torch.bfloat16, torch.bfloat16))
    kinds = [verdict.kind for _, verdict in judged]
    assert len(judged) == 48 and kinds.count("defect") > 36
    clear = [verdict for divergence, verdict in judged if divergence.margin > 1]
    assert clear and all(verdict.kind == "defect" and verdict.noise > 0.5 for verdict in clear)


def test_the_fp32_margins_are_those_of_the_whole_models(source: Folder) -> None:
    other = Changed(source, lambda name, tensor: tensor * (1.1 if "down_proj" in name else 1))
    prompts = tokens(2, 8)
    continuations = Continuations(tokens(2, 6, seed=1), torch.ones(2, 6))
    found = [Divergence(0, 0, 5, 9, 1.0), Divergence(1, 4, 7, 3, 1.0)]
    verdicts = classify(found, source, other, prompts, continuations, torch.bfloat16)
    models = [load_model(checkpoint, torch.float32) for checkpoint in (source, other)]
    for divergence, verdict in zip(found, verdicts, strict=True):
        row = divergence.prompt
        ids = torch.cat([prompts[row], continuations.tokens[row, : divergence.step]])[None]
        with torch.no_grad():
            a, b = (model(input_ids=ids).logits[0, -1] for model in models)
        first, second = divergence.reference_token, divergence.token
        assert verdict.margin_fp32 == pytest.approx(float(a[first] - a[second]), abs=1e-4)
        assert verdict.artifact_margin_fp32 == pytest.approx(float(b[second] - b[first]), abs=1e-4)
        assert verdict.noise == pytest.approx(float((a - b).std()), rel=1e-3)
    assert classify([], source, other, prompts, continuations, torch.bfloat16) == []


VERDICT = Verdict("defect", "weights", 0.03, 0.5, 0.25, 0.125)


def test_an_entry_has_the_numbers_and_the_texts_and_survives_json() -> None:
    tokenizer = tiny_tokenizer()
    the, a = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("the", "a"))
    entry = to_dict(Divergence(2, 7, the, a, 0.5), VERDICT, tokenizer)
    assert entry["reference_text"] == tokenizer.decode([the]) and entry["text"] == "a"
    assert entry["kind"] == "defect" and entry["noise"] == 0.125 and entry["step"] == 7
    assert json.loads(json.dumps(entry)) == entry
    assert describe(entry) == (
        f"prompt 2, token 7, {tokenizer.decode([the])!r} became 'a': defect: in fp32 the reference prefers its token by"
        " 0.5, the artifact its own by 0.25; the weights moved the logits there by 0.12"
    )
    assert "token 3 became token 4" in describe(to_dict(Divergence(2, 7, 3, 4, 0.5), VERDICT, None)).replace("'", "")


def test_a_part_of_a_character_is_shown_by_its_name() -> None:
    tokenizer = tiny_tokenizer()
    part = tokenizer.convert_tokens_to_ids("â")
    assert "\ufffd" in tokenizer.decode([part])
    assert token_text(tokenizer, part) == "â"


@pytest.mark.parametrize("because", ["resolution", "reference", "artifact", "weights"])
def test_every_rule_has_its_words_whatever_was_measured(because: str) -> None:
    entry = to_dict(Divergence(0, 0, 3, 4, 0.5), replace(VERDICT, because=because), None)  # type: ignore[arg-type]
    assert "0.5" in describe(entry)
    assert "nan" in describe({**entry, "margin": None, "margin_fp32": None})


def test_the_summary_counts_and_shows_the_largest_defect() -> None:
    tie = to_dict(Divergence(0, 0, 3, 4, 0.5), judge(0.01, 0.03, 9, 9, 1), None)
    small, large = (
        to_dict(Divergence(prompt, 0, 3, 4, 0.5), replace(VERDICT, margin_fp32=margin), None)
        for prompt, margin in ((1, 0.4), (2, 0.6))
    )
    assert summary([]) == ""
    assert summary([tie, tie]) == "2 near-ties, 0 defects"
    assert summary([small, tie, large]).startswith("1 near-ties, 2 defects, the largest: prompt 2, ")
