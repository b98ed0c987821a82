"""The scorer agrees with transformers' own loss, and its figures with their definitions written out naively."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from calibrate.replay import Replay
from models.checkpoint import Checkpoint, Folder
from models.skeleton import load_model
from tests.helpers import MODEL_TYPES, tiny_checkpoint, tokens
from validate.score import (
    BLOCK,
    SNR_LIMIT_DB,
    TOP,
    Comparison,
    Stream,
    _Sums,
    compare,
    final_hidden,
    final_hiddens,
    no_swap,
    swapped,
    top,
)

LENGTH = 40  # more than twice the sliding window of the tiny models


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folder]:
    """A tiny checkpoint of each model type."""
    root = tmp_path_factory.mktemp("sources")
    return {name: Folder(tiny_checkpoint(root / name, name)) for name in MODEL_TYPES}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Another llama of the same shape."""
    return Folder(tiny_checkpoint(tmp_path_factory.mktemp("other"), "llama", seed=1))


def comparison(a: Checkpoint, b: Checkpoint, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> Comparison:
    return compare(a, final_hidden(a, ids, dtype), b, final_hidden(b, ids, dtype), ids, dtype)


def full_logits(checkpoint: Checkpoint, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with torch.no_grad():
        return load_model(checkpoint, dtype)(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_perplexity_is_that_of_transformers_own_loss(sources: dict[str, Folder], model_type: str) -> None:
    source, ids = sources[model_type], tokens(3, LENGTH)
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    with torch.no_grad():
        losses = [float(model(input_ids=row[None], labels=row[None]).loss) for row in ids]
    scores = comparison(source, source, ids)
    assert scores.nll == pytest.approx(losses, rel=1e-3)
    assert scores.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-3)
    assert scores.tokens == 3 * (LENGTH - 1) and scores.windows == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_layer_by_layer_path_gives_the_full_models_hidden_states_and_logits(
    sources: dict[str, Folder], model_type: str, dtype: torch.dtype
) -> None:
    source, ids = sources[model_type], tokens(2, LENGTH)
    streamed = final_hidden(source, ids, dtype)
    model = load_model(source, dtype)
    caught: list[torch.Tensor] = []
    layers = model.get_submodule("model.layers")
    layers[-1].register_forward_hook(lambda _, __, out: caught.append(out[0] if isinstance(out, tuple) else out))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    assert torch.equal(streamed, caught[0])
    with Replay(source, dtype).end() as finish:
        assert torch.equal(finish(ids, streamed), logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_model_beside_itself_has_lost_nothing(
    sources: dict[str, Folder], model_type: str, dtype: torch.dtype
) -> None:
    scores = comparison(sources[model_type], sources[model_type], tokens(2, LENGTH), dtype)
    assert scores.perplexity_ratio == 1 and scores.perplexity_ratio_se == 0
    assert scores.perplexity == scores.reference_perplexity
    assert scores.kl == 0 and scores.top1 == 1 and scores.top5_overlap == 1
    assert scores.snr_db == SNR_LIMIT_DB and scores.max_logit_difference == 0


@pytest.fixture(scope="module")
def naive(sources: dict[str, Folder], other: Folder) -> tuple[Comparison, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two different models compared, with both models' logits in fp64 and the targets."""
    ids = tokens(5, LENGTH)
    scores = comparison(sources["llama"], other, ids)
    a, b = (full_logits(model, ids)[:, :-1].double() for model in (sources["llama"], other))
    return scores, a, b, ids[:, 1:]


def test_kl_is_the_mean_divergence_from_the_reference(naive: tuple[Comparison, torch.Tensor, ...]) -> None:
    scores, a, b, _ = naive
    p, q = a.softmax(-1), b.softmax(-1)
    expected = float((p * (p / q).log()).sum(-1).mean())
    assert expected > 0.5
    assert scores.kl == pytest.approx(expected, rel=1e-4)


def test_top1_and_top5_count_what_the_two_models_share(naive: tuple[Comparison, torch.Tensor, ...]) -> None:
    scores, a, b, _ = naive
    top1, overlap = [], []
    for x, y in zip(a.flatten(0, 1), b.flatten(0, 1), strict=True):
        top1.append(float(x.argmax() == y.argmax()))
        five = set(x.argsort(descending=True)[:5].tolist()), set(y.argsort(descending=True)[:5].tolist())
        overlap.append(len(five[0] & five[1]) / 5)
    assert scores.top1 == pytest.approx(sum(top1) / len(top1))
    assert scores.top5_overlap == pytest.approx(sum(overlap) / len(overlap))
    assert 0 < scores.top5_overlap < 1


@settings(max_examples=60, deadline=None)
@given(st.integers(6, 9 * BLOCK), st.integers(0, 2**31), st.sampled_from([1.0, 0.0]))
def test_the_first_choices_are_the_largest_wherever_they_stand(vocabulary: int, seed: int, spread: float) -> None:
    logits = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread
    columns, largest = top(logits)
    assert columns.shape == (3, TOP) and all(len(set(row)) == TOP for row in columns.tolist())
    # Where several are equal, any of them.
    assert torch.equal(logits.gather(1, columns), logits.topk(TOP).values)
    assert torch.equal(largest[:, 0], logits.amax(1))


def test_the_sums_leave_the_logits_as_they_are() -> None:
    a, b = torch.randn(2, 7, 40, generator=torch.Generator().manual_seed(0))
    before = a.clone(), b.clone()
    _Sums().add(a, b, torch.arange(7))
    assert torch.equal(a, before[0]) and torch.equal(b, before[1])


def test_signal_to_noise_and_largest_difference(naive: tuple[Comparison, torch.Tensor, ...]) -> None:
    scores, a, b, _ = naive
    expected = 10 * math.log10(float(a.square().sum() / (a - b).square().sum()))
    assert scores.snr_db == pytest.approx(expected, abs=1e-3)
    assert scores.max_logit_difference == pytest.approx(float((a - b).abs().max()), rel=1e-4)


def test_the_ratio_and_its_paired_standard_error(naive: tuple[Comparison, torch.Tensor, ...]) -> None:
    scores, a, b, targets = naive

    def losses(logits: torch.Tensor) -> torch.Tensor:
        return -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0].mean(-1)

    difference = losses(b) - losses(a)
    ratio = float(difference.mean().exp())
    spread = math.sqrt(sum((float(d) - float(difference.mean())) ** 2 for d in difference) / 4)
    assert scores.perplexity_ratio == pytest.approx(ratio, rel=1e-4)
    assert scores.perplexity_ratio == pytest.approx(scores.perplexity / scores.reference_perplexity, rel=1e-9)
    assert scores.perplexity_ratio_se == pytest.approx(ratio * spread / math.sqrt(5), rel=1e-3)
    # Paired: the windows' common difficulty is in neither.
    assert scores.perplexity_ratio_se != pytest.approx(scores.perplexity_se, rel=0.1)


def sums_of(a: list[float], b: list[float]) -> Comparison:
    """A comparison whose windows have these mean losses: two tokens, the first with that likelihood."""
    sums = _Sums()

    def logits(loss: float) -> torch.Tensor:
        # log_softmax of the first of six is -loss.
        others = math.log((1 - math.exp(-loss)) / 5)
        return torch.tensor([[-loss, *[others] * 5]])

    for x, y in zip(a, b, strict=True):
        sums.add(logits(x), logits(y), torch.tensor([0]))
    return sums.comparison()


def test_the_standard_error_agrees_with_a_bootstrap() -> None:
    generator = torch.Generator().manual_seed(0)
    a = (1 + torch.rand(60, generator=generator)).tolist()
    b = [x + 0.2 + 0.1 * float(torch.randn((), generator=generator)) for x in a]
    scores = sums_of(a, b)
    difference = torch.tensor(b) - torch.tensor(a)
    draws = torch.randint(60, (4000, 60), generator=generator)
    bootstrap = float(difference[draws].mean(1).exp().std())
    assert scores.perplexity_ratio_se == pytest.approx(bootstrap, rel=0.1)
    # Unpaired it would be several times larger.
    assert scores.perplexity_se / scores.perplexity > 2 * scores.perplexity_ratio_se / scores.perplexity_ratio


def test_a_single_window_has_no_standard_error() -> None:
    scores = sums_of([1.0], [1.5])
    assert scores.perplexity_se == scores.perplexity_ratio_se == 0
    assert scores.perplexity_ratio == pytest.approx(math.exp(0.5), rel=1e-5)


def test_a_hopeless_model_has_an_infinite_perplexity_and_no_crash() -> None:
    sums = _Sums()
    sums.add(torch.zeros(1, 6), torch.tensor([[-2000.0, 0, 0, 0, 0, 0]]), torch.tensor([0]))
    assert sums.comparison().perplexity == math.inf


def test_logits_that_are_not_numbers_give_figures_that_are_not_numbers() -> None:
    sums = _Sums()
    sums.add(torch.zeros(1, 6), torch.full((1, 6), math.nan), torch.tensor([0]))
    scores = sums.comparison()
    assert math.isnan(scores.perplexity) and math.isnan(scores.snr_db) and math.isnan(scores.kl)


def test_swapped_linears_come_back_also_after_an_error() -> None:
    parent = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Linear(2, 2))
    first, last, other = parent[0], parent[2], torch.nn.Identity()
    with pytest.raises(KeyError), swapped(parent, "m", lambda name: other if name == "m.2" else None):
        assert parent[0] is first and parent[2] is other
        raise KeyError
    assert parent[2] is last
    assert no_swap("m.2") is None


def test_the_swap_computes_instead_of_the_linear(sources: dict[str, Folder], tmp_path: Path) -> None:
    source, ids = sources["llama"], tokens(1, 12)
    seen: list[str] = []

    def swap(name: str) -> torch.nn.Module | None:
        seen.append(name)
        return None

    plain = final_hidden(source, ids, torch.float32)
    assert torch.equal(final_hidden(source, ids, torch.float32, swap), plain)
    projections = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    assert {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in projections} <= set(seen)

    class Zero(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*x.shape[:-1], 128)

    name = "model.layers.1.mlp.down_proj"
    changed = final_hidden(source, ids, torch.float32, lambda module: Zero() if module == name else None)
    assert not torch.allclose(changed, plain)


def test_streams_that_share_a_reading_of_the_weights_compute_as_each_alone(sources: dict[str, Folder]) -> None:
    source, many, few = sources["qwen2"], tokens(4, 12), tokens(2, 9, seed=1)

    class Halved(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / 2

    def halve(module: str) -> torch.nn.Module | None:
        return Halved() if module == "model.layers.0.self_attn.o_proj" else None

    both = final_hiddens(source, [Stream(many), Stream(few, halve)], torch.float32)
    assert torch.equal(both[0], final_hidden(source, many, torch.float32))
    assert torch.equal(both[1], final_hidden(source, few, torch.float32, halve))
    assert not torch.allclose(both[1], final_hidden(source, few, torch.float32))
