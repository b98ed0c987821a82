"""The methods that a target's ``method`` may name, and the one order in which they compose.

A list names exactly one method that chooses codes; the others work around it:

1. stages ``rotate`` and ``awq`` are for rewrites of the weights that keep the model's function; none is built yet;
2. ``rtn``, ``search``, ``gptq`` choose a linear's codes, scales and zeros;
3. ``refine`` improves them for the same layout, and ``tune`` trains them by gradient.

Only data, without torch: configurations are checked against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Stage = Literal["rotate", "awq", "codes", "refine", "tune"]
STAGES: tuple[Stage, ...] = ("rotate", "awq", "codes", "refine", "tune")
Needs = Literal["weights", "moments", "hessian"]
# Methods that train learn from all but one of them at least.
TRAINING_WINDOWS = 2
NEEDS: tuple[Needs, ...] = ("weights", "moments", "hessian")


@dataclass(frozen=True)
class Method:
    """One name of a ``method`` list.

    Attributes:
        stage: its place in the order.
        needs: what it wants to know of a linear's inputs.
        compares: whether it wants the hidden states of the source's layers too.
        trains: whether it works on the whole model behind the layers' other methods, and not without text.
    """

    stage: Stage
    needs: Needs
    compares: bool = False
    trains: bool = False


METHODS: dict[str, Method] = {
    "rtn": Method("codes", "weights"),
    "search": Method("codes", "moments"),
    "gptq": Method("codes", "hessian", compares=True),
    "refine": Method("refine", "hessian"),
    "tune": Method("tune", "moments", trains=True),
}


def composition_problems(names: Sequence[str]) -> list[str]:
    """Why known methods do not compose as they are listed; empty when they do."""
    problems = [f"{name} stands there twice" for name in dict.fromkeys(names) if list(names).count(name) > 1]
    choosers = [name for name in dict.fromkeys(names) if METHODS[name].stage == "codes"]
    if len(choosers) > 1:
        problems.append(f"{' and '.join(choosers)} each choose the codes: name one of them")
    if not choosers:
        every = ", ".join(name for name, method in METHODS.items() if method.stage == "codes")
        problems.append(f"nothing chooses the codes: name one of {every} too")
    ordered = sorted(names, key=lambda name: STAGES.index(METHODS[name].stage))
    if not problems and ordered != list(names):
        problems.append(f"methods work in one order: write [{', '.join(ordered)}]")
    return problems


def needs(names: Sequence[str]) -> Needs:
    """The most that any of the methods wants to know of a linear's inputs."""
    return max((METHODS[name].needs for name in names), key=NEEDS.index)


def compares(names: Sequence[str]) -> bool:
    """Whether any of the methods wants the hidden states of the source's layers too."""
    return any(METHODS[name].compares for name in names)


def trains(names: Sequence[str]) -> bool:
    """Whether any of the methods trains the whole model on calibration text."""
    return any(METHODS[name].trains for name in names)
