"""The methods that a target's ``method`` may name, and the one order in which they compose.

A list names exactly one method that chooses codes; the others work around it:

1. ``fold`` or ``rotate`` rewrites the model before it is quantised, and keeps its function;
2. ``awq`` rescales channels, layer by layer and link by link, and keeps it too;
3. ``fisher`` tells the methods that compensate what errors cost the model, and not only the linear's output;
4. ``rtn``, ``search``, ``gptq`` choose a linear's codes, scales and zeros;
5. ``refine`` improves them for the same layout, and ``tune`` trains them by gradient.

Only data, without torch: configurations are checked against it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Stage = Literal["rewrite", "awq", "weigh", "codes", "refine", "tune"]
STAGES: tuple[Stage, ...] = ("rewrite", "awq", "weigh", "codes", "refine", "tune")
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
        compensates: whether a channel's error is made up for by others.
        links: whether it works only for families that name the links between their modules.
        measures: whether it does nothing without text.
        weighs: whether it measures what the model's loss makes of the linears' errors.
    """

    stage: Stage
    needs: Needs
    compares: bool = False
    trains: bool = False
    compensates: bool = False
    links: bool = False
    measures: bool = False
    weighs: bool = False


METHODS: dict[str, Method] = {
    "fold": Method("rewrite", "weights", links=True),
    "rotate": Method("rewrite", "weights", links=True),
    "awq": Method("awq", "hessian", links=True, measures=True),
    "fisher": Method("weigh", "hessian", measures=True, weighs=True),
    "rtn": Method("codes", "weights"),
    "search": Method("codes", "moments"),
    "gptq": Method("codes", "hessian", compares=True, compensates=True),
    "refine": Method("refine", "hessian", compensates=True),
    "tune": Method("tune", "moments", trains=True),
}


def composition_problems(names: Sequence[str]) -> list[str]:
    """Why known methods do not compose as they are listed; empty when they do."""
    problems = [f"{name} stands there twice" for name in dict.fromkeys(names) if list(names).count(name) > 1]
    choosers = [name for name in dict.fromkeys(names) if METHODS[name].stage == "codes"]
    if len(choosers) > 1:
        problems.append(f"{' and '.join(choosers)} each choose the codes: name one of them")
    rewrites = rewrites_of(dict.fromkeys(names))
    if len(rewrites) > 1:
        problems.append(f"{' and '.join(rewrites)} each fold the norms: name one of them")
    if not choosers:
        every = ", ".join(name for name, method in METHODS.items() if method.stage == "codes")
        problems.append(f"nothing chooses the codes: name one of {every} too")
    if weighs(names) and choosers and not any(METHODS[name].compensates for name in choosers):
        problems.append(f"fisher weighs errors that one channel makes up for another: {choosers[0]} makes up for none")
    ordered = sorted(names, key=lambda name: STAGES.index(METHODS[name].stage))
    if not problems and ordered != list(names):
        problems.append(f"methods work in one order: write [{', '.join(ordered)}]")
    return problems


def rewrites_of(names: Iterable[str]) -> list[str]:
    """The methods that change the model's weights before anything is quantised."""
    return [name for name in names if METHODS[name].stage == "rewrite"]


def needs(names: Sequence[str]) -> Needs:
    """The most that any of the methods wants to know of a linear's inputs."""
    return max((METHODS[name].needs for name in names), key=NEEDS.index)


def compares(names: Sequence[str]) -> bool:
    """Whether any of the methods wants the hidden states of the source's layers too."""
    return any(METHODS[name].compares for name in names)


def trains(names: Sequence[str]) -> bool:
    """Whether any of the methods trains the whole model on calibration text."""
    return any(METHODS[name].trains for name in names)


def weighs(names: Iterable[str]) -> bool:
    """Whether any of the methods wants the model's loss."""
    return any(METHODS[name].weighs for name in names)


def measures(names: Sequence[str]) -> list[str]:
    """The methods that do nothing without text."""
    return [name for name in names if METHODS[name].measures]
