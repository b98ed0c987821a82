"""Contexts beyond the sliding window: scored as by the full model, with a needle that only full layers reach."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from calibrate.text import tokenise
from models.checkpoint import Folder
from models.errors import BadInput
from models.tokenizer import load_tokenizer
from models.wide import widen
from tests.helpers import ROOT, TEXT, WINDOW, tiny_checkpoint, tokens
from validate.long_context import LongText, compare_long, long_logprobs, long_text, sliding_window

COUNT = 3
# The needle in windows of 16.
SHORT = 4
SPARK = ROOT / "examples" / "spark-tiny"


@pytest.fixture(scope="module")
def text() -> LongText:
    return long_text(tokens(2000), WINDOW, COUNT)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tiny_checkpoint(tmp_path_factory.mktemp("hybrid"), "spark2_5"))


def transformers_logprobs(path: Path, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    widen(model, dtype)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def test_a_needle_stands_early_and_at_the_end(text: LongText) -> None:
    assert text.plain.shape == text.hidden.shape == (COUNT, 4 * WINDOW)
    different = (text.plain != text.hidden).any(dim=0).nonzero().flatten()
    start = int(different[0])
    assert start >= 0 and int(different[-1]) < start + SHORT <= WINDOW
    assert torch.equal(text.hidden[:, start : start + SHORT], text.hidden[:, -SHORT:])
    # Farther than what stacked windows of a layer or two see.
    assert text.distance == 4 * WINDOW - SHORT - start > 2 * WINDOW
    assert not torch.equal(text.plain[0, -SHORT:], text.plain[1, -SHORT:])
    led = long_text(tokens(2000), WINDOW, COUNT, leading=(0,))
    assert led.both[:, 0].eq(0).all() and torch.equal(led.hidden[:, 1:], text.hidden[:, 1:])
    with pytest.raises(BadInput, match="long_context: expected at least 3 windows of 64 tokens"):
        long_text(tokens(100), WINDOW, COUNT)


def test_four_windows_are_scored_as_the_full_model_scores_them(hybrid: Folder, text: LongText) -> None:
    assert sliding_window(hybrid) == WINDOW
    expected = transformers_logprobs(hybrid.path, text.both, torch.float32)
    assert torch.allclose(long_logprobs(hybrid, text, torch.float32), expected, atol=2e-3, rtol=1e-3)


def test_full_layers_see_the_needle_and_sliding_layers_do_not(text: LongText, tmp_path: Path, hybrid: Folder) -> None:
    alone = Folder(tiny_checkpoint(tmp_path / "sliding", "spark2_5", num_hidden_layers=1))
    scored = long_logprobs(alone, text, torch.float32)
    assert torch.equal(scored[:COUNT, -SHORT:], scored[COUNT:, -SHORT:])
    seen = long_logprobs(hybrid, text, torch.float32)
    assert (seen[:COUNT, -SHORT:] - seen[COUNT:, -SHORT:]).abs().max() > 1e-3


def test_the_figures_are_their_definitions(text: LongText) -> None:
    generator = torch.Generator().manual_seed(0)
    reference, model = -torch.rand(2, 2 * COUNT, 4 * WINDOW - 1, generator=generator, dtype=torch.float64)
    found = compare_long(text, reference, model)
    lost = [[reference[w, p - 1] - model[w, p - 1] for p in range(1, 4 * WINDOW - SHORT)] for w in range(COUNT)]
    flat = [float(value) for row in lost for value in row]
    assert found["perplexity_ratio"] == pytest.approx(math.exp(sum(flat) / len(flat)))
    for quarter, ratio in enumerate(found["quarters"]):
        places = [p for p in range(1, 4 * WINDOW - SHORT) if p // WINDOW == quarter]
        values = [float(row[p - 1]) for row in lost for p in places]
        assert ratio == pytest.approx(math.exp(sum(values) / len(values)))
    ends = range(4 * WINDOW - SHORT + 1, 4 * WINDOW)
    gains = [float(model[COUNT + w, p - 1] - model[w, p - 1]) for w in range(COUNT) for p in ends]
    assert found["needle"]["gain"] == pytest.approx(sum(gains) / len(gains))
    assert found["needle"]["distance"] == text.distance


def test_a_model_beside_itself_has_lost_nothing_and_scores_the_same_twice(hybrid: Folder, text: LongText) -> None:
    first, again = (long_logprobs(hybrid, text, torch.bfloat16) for _ in range(2))
    assert torch.equal(first, again)
    found = compare_long(text, first, first)
    assert found["perplexity_ratio"] == 1 and found["quarters"] == [1, 1, 1, 1]
    assert found["needle"]["gain"] == found["needle"]["reference_gain"]


def test_the_trained_example_keeps_its_perplexity_at_four_windows() -> None:
    """Text at positions beyond the window is predicted as well as before it, by our scorer and by transformers."""
    source = Folder(SPARK)
    window = sliding_window(source)
    assert window == 64
    ids = tokenise(load_tokenizer(source), TEXT.read_text(encoding="utf-8")[:120_000])
    text = long_text(ids, window, 6)
    ours = long_logprobs(source, text, torch.bfloat16)
    assert torch.allclose(ours, transformers_logprobs(SPARK, text.both, torch.bfloat16), atol=0.05, rtol=0.01)
    quarters = [ours[:6, q * window : (q + 1) * window - text.needle].mean() for q in range(4)]
    assert max(quarters) - min(quarters) < 0.5 and min(quarters) > -4.6


def test_a_model_without_a_window_has_no_long_context(tmp_path: Path) -> None:
    assert sliding_window(Folder(tiny_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=1))) is None
