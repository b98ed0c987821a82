"""The stages that a target goes through, and what each one's result rests on: a stage is named by the hash of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from calibrate.composition import rewrites_of
from calibrate.quantize import Recipe
from calibrate.text import Windows, digest_of
from calibrate.tune import seen
from convert.judge import Job
from convert.prepare import Texts
from convert.store import STAGE_VERSIONS
from export.phone.plan import PhonePlan
from export.plan import Plan, TargetPlan

Content = Mapping[str, Any]
# Chooses the codes whose loss a budget looks at: cheap, and near enough to tell which linears are sensitive.
SENSITIVITY_METHOD = ("search",)


@dataclass(frozen=True)
class Stages:
    """Of one target. Each property but the first three is what decides a stage's content, None where the target has
    no such stage.

    Attributes:
        job: what the run's targets share.
        plan: the target's; where a budget keeps linears, another one after it was spent.
        texts: the run's, whether the target's methods look at the calibration text or not.
        own: int64 [count, tokens], the windows of the stage `generated`; None as long as the model has not written
            them. No key rests on more than what they are made from.
    """

    job: Job
    plan: Plan
    texts: Texts
    own: torch.Tensor | None = None

    @property
    def windows(self) -> Windows | None:
        """The calibration text, where the target's methods look at it."""
        return self.texts.calibration if self.plan.uses_text else None

    @property
    def ids(self) -> torch.Tensor | None:
        """The token ids [count, tokens] that the methods work with: of the text, then the model's own."""
        if self.windows is None or self.generated is None:
            return None if self.windows is None else self.windows.ids
        if self.own is None:
            raise ValueError("the model's own windows are not there yet")
        return torch.cat([self.windows.ids, self.own])

    @property
    def shown(self) -> torch.Tensor | None:
        """Those without the ones that judge a training."""
        return None if self.ids is None else self._shown(self.ids)

    def _shown(self, ids: torch.Tensor) -> torch.Tensor:
        return seen(ids) if self.plan.recipe.trains else ids

    @property
    def generated(self) -> Content | None:
        """What the model writes itself, the same for all targets."""
        if self.windows is None or self.texts.generation is None:
            return None
        return {"source": self.job.source["files"], **asdict(self.texts.generation)}

    def _resting(self, content: dict[str, Any]) -> Content:
        """A stage's content, with the model's own windows where there are any."""
        return content if self.generated is None else content | {"generated": self.generated}

    @property
    def sensitivity(self) -> Content | None:
        """What each linear's rounding costs, where a budget is spent by it."""
        if not isinstance(self.plan, TargetPlan) or self.plan.spec.budget is None or self.windows is None:
            return None
        return {
            **self.calibrate,
            "recipe": repr(sensitivity_recipe(self.plan.recipe)),
            "rewrites": self.plan.rewrites,
        }

    @property
    def fisher(self) -> Content | None:
        """The Fisher information on the windows that the methods are shown, for all targets with the same weights."""
        if not self.plan.recipe.weighs or self.windows is None:
            return None
        content = {
            "source": self.job.source["files"],
            "rewrites": rewrites_of(self.plan.recipe.method),
            "dtype": str(self.plan.recipe.dtype),
            "windows": digest_of(self._shown(self.windows.ids)),
        }
        # Which of the model's own windows are shown depends on how many there are of the text.
        return content if self.generated is None else self._resting(content | {"text": self.windows.digest()})

    @property
    def calibrate(self) -> Content:
        """The quantised layers."""
        content = {
            "source": self.job.source["files"],
            "recipe": repr(self.plan.recipe),
            "windows": None if self.windows is None else self.windows.digest(),
        }
        # What it measures follows from the rest; how it is measured does not.
        weighed = {"fisher": STAGE_VERSIONS["fisher"]} if self.plan.recipe.weighs else {}
        return self._resting(content | weighed)

    @property
    def observe(self) -> Content | None:
        """A phone graph's ranges."""
        return {"calibrate": self.calibrate} | self.plan.key() if isinstance(self.plan, PhonePlan) else None

    @property
    def export(self) -> str:
        """The artifact's bytes, hashed: its ledger holds this. A budget's plan is the one before it is spent."""
        content = {
            "calibrate": self.job.store.key("calibrate", self.calibrate),
            "shard_bytes": self.job.prepared.pipeline.output.shard_bytes,
        }
        return self.job.store.key("export", content | self.plan.key())

    def named(self) -> dict[str, Content]:
        """The stages of the work folder that this target has, by their names there."""
        every = {name: getattr(self, name) for name in ("generated", "sensitivity", "fisher", "calibrate", "observe")}
        return {name: content for name, content in every.items() if content is not None}


def sensitivity_recipe(recipe: Recipe) -> Recipe:
    """What quantises the linears whose sensitivity is looked at."""
    return replace(recipe, method=SENSITIVITY_METHOD, int8_inputs=False)
