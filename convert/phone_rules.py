"""What a pipeline's texts must be for a phone target, whose graphs have a fixed context."""

from __future__ import annotations

from convert.config import Pipeline
from convert.target import Target
from export.phone.options import I_KNOW, STEPS

UNCALIBRATED = "uncalibrated-ranges"
_RANGES = f"a prefill chunk and {STEPS} decode steps that ranges are seen in"


def phone_problems(target: Target, pipeline: Pipeline) -> list[str]:
    """Why a pipeline's texts do not suit a phone target."""
    where = f"target {target.name} (phone)"
    problems = []
    calibration, validation = pipeline.calibration, pipeline.validation
    if calibration is None and UNCALIBRATED not in target.i_know:
        problems.append(
            f"{where}: the ranges of activations need a `calibration:` text: {I_KNOW[UNCALIBRATED]};"
            f" where that is wanted all the same: `i_know: [{UNCALIBRATED}]`"
        )
    shortest = target.prefill + STEPS
    if target.context < shortest:
        problems.append(f"{where}: context: expected at least {shortest}, {_RANGES}, found {target.context}")
    elif calibration is not None and calibration.sequence_length < shortest:
        found = calibration.sequence_length
        problems.append(f"{where}: calibration.sequence_length: expected at least {shortest}, {_RANGES}, found {found}")
    lengths = {}
    if calibration is not None:
        lengths["calibration.sequence_length"] = calibration.sequence_length
    if validation is not None and validation.engine:
        greedy = validation.greedy
        lengths["validation.sequence_length"] = validation.sequence_length
        lengths["validation.greedy: prompt_tokens and tokens"] = greedy.prompt_tokens + greedy.tokens
    problems += [
        f"{where}: {key}: expected at most the context ({target.context}), found {length}"
        for key, length in lengths.items()
        if length > target.context
    ]
    return problems
