"""An earlier run as the measure of a new one: which it is, and what differs beyond the noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from validate.entry import Entry, Subject

# Standard errors: a run that lost nothing exceeds two in one case of 44.
NOISE = 2.0
NAMES = ("last", "best")
# Over the median absolute deviation of normal values, it is their standard deviation.
NORMAL = 1.4826
# How far the standard error may exceed that of the typical window. Without a limit a single window that breaks would
# be its own excuse: it moves the mean and the standard error by the same amount.
TAILS = 1.5
# exp of more overflows.
MAX_EXPONENT = 700.0


@dataclass(frozen=True)
class Difference:
    """A run's perplexity beside an earlier run's on the same windows.

    Attributes:
        then: the earlier run's id.
        increase: of the perplexity, relative: exp of the mean difference of the windows' losses, minus one.
        se: its standard error, paired by windows (delta method).
        typical_se: the same from the windows' median absolute deviation, which a few broken windows do not move.
    """

    then: str
    increase: float
    se: float
    typical_se: float

    @property
    def noise(self) -> float:
        """The largest increase that the noise may explain."""
        return NOISE * min(self.se, TAILS * self.typical_se)

    @property
    def inside_noise(self) -> bool:
        return abs(self.increase) <= self.noise

    @property
    def text(self) -> str:
        """For people."""
        if not math.isfinite(self.increase):
            return f"the perplexity of this run or of {self.then} is not finite"
        if self.increase == 0:
            return f"perplexity equal to that of {self.then}"
        word = "above" if self.increase > 0 else "below"
        amount = f"perplexity {abs(self.increase):.3%} ± {self.se:.3%} {word} that of {self.then}"
        return amount + (", which is inside the noise" if self.inside_noise else ", beyond the noise")


def difference(then: Entry, nll: Sequence[float]) -> Difference:
    """Compares windows' mean negative log-likelihoods in nats with an earlier entry's of the same windows."""
    losses = torch.tensor(nll, dtype=torch.float64) - torch.tensor(then.nll, dtype=torch.float64)
    mean = float(losses.mean())
    ratio = math.exp(mean) if abs(mean) < MAX_EXPONENT else math.nan
    root = math.sqrt(len(losses))
    spread = float(losses.std()) / root if len(losses) > 1 else 0.0
    typical = NORMAL * float((losses - losses.quantile(0.5)).abs().quantile(0.5)) / root
    return Difference(then.run, ratio - 1, ratio * spread, ratio * typical)


@dataclass(frozen=True)
class Baseline:
    """What a run was compared with, or the reason why it was not: exactly one of the two."""

    difference: Difference | None = None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As a report holds it; a figure that is not finite is None."""
        if self.difference is None:
            return {"reason": self.reason}
        found = self.difference
        finite = math.isfinite(found.increase)
        return {
            "run": found.then,
            "increase": found.increase if finite else None,
            "se": found.se if finite else None,
            "inside_noise": finite and found.inside_noise,
            "text": found.text,
        }


def find_baseline(
    wanted: str, target: str, subject: Subject, nll: Sequence[float], earlier: Sequence[Entry]
) -> Baseline:
    """Finds `last`, `best` or a run's id among earlier entries of a target, and compares.

    Entries of other targets, models and texts are not compared. Of the others, `last` and `best` take those that held
    their gates: a run that got worse must not become the measure of the next one.

    Args:
        subject, nll: of the run that is judged.
        earlier: oldest first.
    """
    same = [entry for entry in earlier if entry.target == target and (wanted in NAMES or entry.run == wanted)]
    if not same:
        return Baseline(reason=f"the history has no {'earlier run' if wanted in NAMES else wanted} of {target}")
    comparable = [entry for entry in same if not subject.differs(entry.subject)]
    if not comparable:
        return Baseline(reason=f"{same[-1].run} cannot be compared: {'; '.join(subject.differs(same[-1].subject))}")
    # A run that is named is meant, whatever became of its gates.
    kept = [entry for entry in comparable if entry.measures_others or wanted not in NAMES]
    if not kept:
        return Baseline(reason=f"none of the {len(comparable)} earlier runs of {target} held its gates")
    chosen = min(kept, key=lambda entry: entry.loss) if wanted == "best" else kept[-1]
    return Baseline(difference(chosen, nll))
