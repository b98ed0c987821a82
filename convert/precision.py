"""`bits_per_weight` of a target: its plan again, with the linears kept that the budget buys back most with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from calibrate.quantize import quantize
from calibrate.results import Results
from convert.budget import kept_plan
from convert.stages import Stages, sensitivity_recipe
from export.plan import TargetPlan
from models.files import replace_file, to_json
from validate.explain import Progress
from validate.precision import mean_bits, sensitivities, within

# In the stage's folder, once it is done.
PARTS = "parts.json"


@dataclass(frozen=True)
class Chosen:
    """What a budget came to.

    Attributes:
        plan: of the target.
        note: for the ledger and the summary.
        table: rows of `validate.precision`, as JSON values.
    """

    plan: TargetPlan
    note: str
    table: list[dict[str, Any]]


def with_precision(stages: Stages, progress: Progress) -> Chosen | None:
    """Spends a target's budget; None where it has none, or no text to spend it by."""
    plan, content, model = stages.plan, stages.sensitivity, stages.job.prepared.model
    if content is None:
        return None
    assert isinstance(plan, TargetPlan) and plan.spec.budget is not None
    budget, recipe, view = plan.spec.budget, sensitivity_recipe(plan.recipe), plan.rewritten(model)
    folder = stages.job.store.stage("sensitivity", content)
    file = folder / PARTS
    if not file.is_file():
        windows = stages.ids
        assert windows is not None
        results = Results(folder / "layers")
        quantize(view.checkpoint, model.linears, recipe, windows, results, progress)
        parts = sensitivities(view, plan, results, windows, progress)
        replace_file(file, to_json(parts))
    rows = within(model, plan, json.loads(file.read_text(encoding="utf-8")), budget)
    kept = [row for row in rows if row.kept]
    final = kept_plan(plan, view, [name for row in kept for name in row.linears])
    share = sum(row.kl for row in kept) / max(sum(row.kl for row in rows), 1e-30)
    note = (
        f"bits_per_weight: {sum(len(row.linears) for row in kept)} of {len(plan.linears)} linears stay in"
        f" {str(plan.dtype).removeprefix('torch.')}, {mean_bits(plan, rows):.4g} bits per weight of at most {budget:g},"
        f" with them {share:.0%} of the divergence that was attributed to rounding"
    )
    return Chosen(final, note, [asdict(row) for row in rows])
