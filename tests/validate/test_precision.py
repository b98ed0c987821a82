"""A budget of bits is spent on what buys back most, and never overspent."""

from __future__ import annotations

from itertools import combinations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from calibrate.coded import Coded
from export.artifact import Expansion
from tests.workshop import Workshop, spec
from validate.advice import Skip
from validate.precision import PARTS, best

SKIPS = st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(1, 50)), min_size=1, max_size=7).map(
    lambda pairs: [Skip((str(i),), kl, float(bits)) for i, (kl, bits) in enumerate(pairs)]
)


@settings(deadline=None, max_examples=50)
@given(SKIPS, st.integers(1, 150))
def test_what_is_kept_fits_and_no_other_choice_buys_back_more(skips: list[Skip], capacity: int) -> None:
    chosen = best(skips, capacity)
    assert sum(skip.extra_bits for skip in chosen) <= capacity + 1e-9
    every = [part for count in range(len(skips) + 1) for part in combinations(skips, count)]
    # Sizes are rounded up to parts of the capacity.
    rounding = len(skips) * capacity / PARTS
    fitting = [sum(s.kl for s in part) for part in every if sum(s.extra_bits for s in part) <= capacity - rounding]
    assert sum(skip.kl for skip in chosen) >= max(fitting, default=0.0) - 1e-9


def test_a_coded_checkpoint_reads_as_the_artifact_that_holds_its_codes(workshop: Workshop) -> None:
    for case in ("llama-tied", "spark2_5"):
        for head in (True, False):
            built = workshop.built(case, spec("awq", quantize_head=head))
            model, expansion = built.model, Expansion(built.artifact)
            coded = Coded(model.checkpoint, built.plan.linears, model.dimensions.layers, built.results, torch.bfloat16)
            assert set(coded.tensors) == set(expansion.tensors)
            assert coded.config.get("tie_word_embeddings") == expansion.config.get("tie_word_embeddings")
            for name in coded.tensors:
                assert torch.equal(coded.read(name), expansion.read(name)), name


def test_linears_of_a_fused_module_that_are_not_quantised_keep_their_rows(workshop: Workshop) -> None:
    built = workshop.built("phi3", spec("awq"))
    model = built.model
    part = [linear for linear in built.plan.linears if not linear.name.endswith("k_proj")]
    coded = Coded(model.checkpoint, part, model.dimensions.layers, built.results, torch.bfloat16)
    for linear in built.plan.linears[:3]:
        rows = slice(linear.start, linear.stop)
        source = model.checkpoint.read(f"{linear.module}.weight")[rows]
        assert torch.equal(coded.read(f"{linear.module}.weight")[rows], source) == linear.name.endswith("k_proj")
