"""`bits_per_weight` of a target: its plan again, with the linears kept that the budget buys back most with."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from calibrate.quantize import Recipe, quantize
from calibrate.results import Results
from convert.budget import kept_plan
from convert.judge import Job
from export.plan import TargetPlan
from models.files import replace_file, to_json
from validate.explain import Progress
from validate.precision import mean_bits, sensitivities, within

# Chooses the codes whose loss is looked at: cheap, and near enough to tell which linears are sensitive.
METHOD = ("search",)
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


def sensitivity_key(plan: TargetPlan, content: dict[str, Any]) -> dict[str, Any]:
    """What decides how much of the loss each linear causes; ``content`` decides the plan's quantised layers."""
    return {**content, "recipe": repr(_recipe(plan)), "rewrites": plan.rewrites}


def _recipe(plan: TargetPlan) -> Recipe:
    return replace(plan.recipe, method=METHOD, int8_inputs=False)


def with_precision(
    job: Job, plan: TargetPlan, content: dict[str, Any], windows: torch.Tensor, progress: Progress
) -> Chosen:
    """Spends a plan's budget.

    Args:
        content: what decides the plan's quantised layers.
        windows: calibration token ids [count, tokens].
    """
    budget, model = plan.spec.budget, job.prepared.model
    assert budget is not None
    recipe, view = _recipe(plan), plan.rewritten(model)
    folder = job.store.stage("sensitivity", sensitivity_key(plan, content))
    file = folder / PARTS
    if not file.is_file():
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
