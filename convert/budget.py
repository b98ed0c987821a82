"""A target's plan with single linears kept, and whether its format and its family have a way to say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from export.plan import TargetPlan, make_plan
from models.errors import BadInput
from models.opened import OpenedModel
from validate.advice import Skip, patterns


def kept_plan(plan: TargetPlan, view: OpenedModel, names: Sequence[str]) -> TargetPlan:
    """The plan with those linears left unquantised.

    Args:
        view: the model in the weights that are quantised.

    Raises:
        BadInput: where the format cannot say so.
    """
    family = view.family
    spec = replace(
        plan.spec,
        skip=(*plan.spec.skip, *patterns([Skip(tuple(names), 0.0, 0.0)], family)),
        quantize_head=plan.spec.quantize_head and family.head not in names,
    )
    kept = make_plan(spec, view.checkpoint, family, view.linears, plan.dtype)
    # Patterns name no head.
    head = tuple(linear for linear in plan.linears if linear.layer is None and linear.name in names)
    return replace(kept, skipped=(*kept.skipped, *head))


def check_budget(plan: TargetPlan, view: OpenedModel) -> None:
    """Raises BadInput for a budget that buys nothing, or that the format has no way to spend on single linears."""
    budget = plan.spec.budget
    if budget is None:
        return
    where = f"target {plan.spec.name} ({plan.spec.format}): bits_per_weight"
    if budget <= plan.bits_per_weight:
        raise BadInput(f"{where}: expected more than the {plan.bits_per_weight:.4g} without it, found {budget:g}")
    # The last linear of a layer stands alone in every family: engines load it as one with no other.
    last = next((linear.name for linear in plan.linears if linear.name.endswith(view.family.linears[-1])), None)
    try:
        kept_plan(plan, view, [] if last is None else [last])
    except BadInput as error:
        problem = error.problems[0].partition("): ")[2]
        raise BadInput(f"{where}: this format cannot keep single linears of this family: {problem}") from error
