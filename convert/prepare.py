"""Everything before the first weight is read: the source opened, every target planned, every problem in one message."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from calibrate.generated import Generation, first_tokens
from calibrate.overlap import overlap
from calibrate.rewrites import rewritten
from calibrate.text import (
    Leading,
    Text,
    Windows,
    calibration_windows,
    check_vocabulary,
    evaluation_windows,
    leading_tokens,
    load_text,
    tokenise,
    with_leading,
)
from convert.budget import check_budget
from convert.config import Dataset, Pipeline, Validation, dataset_arguments
from convert.device import probe, read_device, recommend
from convert.engines import find_engines
from convert.phone_rules import phone_problems
from convert.target import Target
from convert.yaml_lines import suggestion
from export.phone.plan import FORMAT, PhoneSpec, make_phone_plan
from export.plan import Plan, TargetSpec, make_plan
from models.errors import BadInput
from models.opened import OpenedModel, open_model
from models.source import open_source
from models.tokenizer import load_tokenizer
from validate.engines.check import EngineSpec
from validate.long_context import LongText, long_text, sliding_window
from validate.measure import Settings

# A smaller share is a quotation that both texts have.
OVERLAP = 0.01


@dataclass(frozen=True)
class Texts:
    """What the texts of a pipeline came to: ``calibration``, ``generation`` and ``settings`` as `Prepared` gives them,
    and ``warnings`` about calibration and validation together."""

    calibration: Windows | None
    generation: Generation | None
    settings: Settings | None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prepared:
    """A pipeline, ready to run.

    Attributes:
        plans: of the chosen targets.
        reasons: of ``format: auto`` targets, why their format was chosen, by target name.
        device: the profile of this machine.
        engines: that run the artifacts.
    """

    pipeline: Pipeline
    model: OpenedModel
    plans: tuple[Plan, ...]
    reasons: dict[str, str]
    device: dict[str, Any]
    engines: tuple[EngineSpec, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.pipeline.model.dtype)
        return dtype

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.model.checkpoint, tuple(self.pipeline.model.trust_remote_code or ()))

    def _text(self, dataset: Dataset) -> str:
        return read_text(dataset, self.pipeline.folder, self.pipeline.work_folder / "datasets")

    def texts(self) -> Texts:
        """All texts.

        Raises:
            BadInput: with the problems of all together, and, where validation is strict, when one is part of the
                other.
        """
        results: list[Any] = []
        problems: list[str] = []
        for cut in (self.calibration, self.generation, self.settings):
            try:
                results.append(cut())
            except BadInput as error:
                problems += error.problems
        if problems:
            # A missing tokenizer, say, is a problem of all.
            raise BadInput(dict.fromkeys(problems))
        calibration, generation, settings = results
        warnings = _overlap_warnings(calibration, settings)
        if warnings and self.pipeline.validation and self.pipeline.validation.strict:
            raise BadInput(f"{warning} (validation: strict: true)" for warning in warnings)
        return Texts(calibration, generation, settings, warnings)

    def calibration(self) -> Windows | None:
        """The calibration windows, when there is a text and a method gains from it; each begins as those of the
        validation do."""
        config = self.pipeline.calibration
        if config is None or not any(plan.uses_text for plan in self.plans):
            return None
        text = self._text(config.dataset)
        windows = calibration_windows(
            self.tokenizer, text, config.samples, config.sequence_length, config.seed, self._leading()
        )
        check_vocabulary(self.tokenizer, windows.ids, self.model.vocabulary, self.model.checkpoint.name)
        return windows

    def generation(self) -> Generation | None:
        """The windows that the model is to write itself, where there are calibration windows and the section asks for
        others."""
        config = self.pipeline.calibration
        if config is None or not config.generated or not any(plan.uses_text for plan in self.plans):
            return None
        leading, length = self._leading().ids, config.sequence_length
        first = leading or first_tokens(self.tokenizer)
        return Generation(config.generated, length, first, bool(leading), config.seed, self.pipeline.model.dtype)

    def _leading(self) -> Leading:
        validation = self.pipeline.validation
        return leading_tokens(self.tokenizer, "auto" if validation is None else validation.bos)

    def settings(self) -> Settings | None:
        """How artifacts are measured; None without a ``validation`` section."""
        config = self.pipeline.validation
        if config is None:
            return None
        text = self._text(config.dataset)
        return validation_settings(config, text, self.tokenizer, self.model, self.dtype, self.engines)


def _overlap_warnings(calibration: Windows | None, settings: Settings | None) -> tuple[str, ...]:
    if calibration is None or settings is None:
        return ()
    share = overlap(settings.windows.ids, calibration.text_ids)
    if share < OVERLAP:
        return ()
    return (
        f"{share:.0%} of the validation text stands in the calibration text: what the artifacts lose on text that they"
        " were not calibrated on is more than is measured here",
    )


def read_text(dataset: Dataset, folder: Path, cache: Path) -> str:
    """A data set's text; its relative paths start at ``folder``."""
    arguments = dataset_arguments(dataset, folder)
    text = Text(
        path=arguments["path"],
        name=arguments.get("name"),
        data_files=tuple(arguments.get("data_files", ())),
        split=arguments["split"],
        column=dataset.column,
    )
    return load_text(text, cache)


def validation_settings(
    config: Validation,
    text: str,
    tokenizer: Any,
    model: OpenedModel,
    dtype: torch.dtype,
    engines: tuple[EngineSpec, ...] = (),
) -> Settings:
    """How artifacts are measured on a text.

    Raises:
        BadInput: when the text is too short, or the tokenizer does not match the model.
    """
    greedy = config.greedy
    leading = leading_tokens(tokenizer, config.bos)
    windows = evaluation_windows(tokenizer, text, config.tokens, config.sequence_length, leading)
    text_ids = tokenise(tokenizer, text)
    prompts = with_leading(leading, text_ids, greedy.prompts, greedy.prompt_tokens, "greedy prompts")
    for ids in (windows.ids, prompts):
        check_vocabulary(tokenizer, ids, model.vocabulary, model.checkpoint.name)
    return Settings(
        windows=windows,
        prompts=prompts,
        greedy_tokens=greedy.tokens,
        engine_windows=max(1, config.engine_tokens // config.sequence_length) if config.engine else 0,
        gates=config.gates.model_dump(),
        dtype=dtype,
        engines=engines,
        long=_long_text(config, text_ids, leading, model),
        tokenizer=tokenizer,
    )


def _long_text(config: Validation, ids: torch.Tensor, leading: Leading, model: OpenedModel) -> LongText | None:
    """Raises BadInput for a model without a sliding window: what was asked for would not be measured."""
    if not config.long_context:
        return None
    window = sliding_window(model.checkpoint)
    if window is None:
        raise BadInput("validation: long_context: this model has no sliding window; leave the key out")
    return long_text(ids, window, config.long_context, leading.ids)


def prepare(pipeline: Pipeline, only: tuple[str, ...] = ()) -> Prepared:
    """Opens the source and plans the chosen targets from headers.

    Raises:
        BadInput: with the problems of all targets together.
    """
    chosen = _chosen(pipeline, only)
    model = open_model(
        open_source(
            pipeline.model.source,
            base=pipeline.folder,
            side_folder=pipeline.work_folder / "tokenizer",
            revision=pipeline.model.revision,
            allow_pickle=tuple(pipeline.model.allow_pickle or ()),
            allow_code=tuple(pipeline.model.trust_remote_code or ()),
        )
    )
    dtype = getattr(torch, pipeline.model.dtype)
    device = probe()
    problems: list[str] = []
    plans: list[Plan] = []
    reasons = {}
    for target in chosen:
        try:
            resolved, reason = _resolve(target, pipeline, device)
            if reason:
                reasons[target.name] = reason
            plans.append(_plan(resolved, pipeline, model, dtype))
        except BadInput as error:
            problems += error.problems
    if problems:
        raise BadInput(problems)
    return Prepared(pipeline, model, tuple(plans), reasons, device.model_dump(mode="json"), _engines(pipeline, plans))


def _plan(target: Target, pipeline: Pipeline, model: OpenedModel, dtype: torch.dtype) -> Plan:
    if target.format != FORMAT:
        spec = to_spec(target)
        # Of a family without links make_plan says so, of all methods at once.
        view = model if model.family.links is None else _rewritten(spec, model, dtype)
        serving = make_plan(spec, view.checkpoint, model.family, model.linears, dtype)
        check_budget(serving, view)
        return serving
    problems = phone_problems(target, pipeline)
    try:
        plan = make_phone_plan(
            PhoneSpec(name=target.name, method=tuple(target.method), options=target.phone_options), model
        )
    except BadInput as error:
        problems += error.problems
    if problems:
        raise BadInput(problems)
    return plan


def _rewritten(spec: TargetSpec, model: OpenedModel, dtype: torch.dtype) -> OpenedModel:
    try:
        return rewritten(model, spec.method, dtype, values=True)
    except BadInput as error:
        raise BadInput(f"target {spec.name} ({spec.format}): {problem}" for problem in error.problems) from error


def _engines(pipeline: Pipeline, plans: list[Plan]) -> tuple[EngineSpec, ...]:
    """Looked for before any work, so that an absent one costs nothing."""
    names: list[str] = [*pipeline.validation.engines] if pipeline.validation else []
    formats = [plan.spec.format for plan in plans]
    return find_engines(names, formats, section=pipeline.engines, base=pipeline.folder)


def _chosen(pipeline: Pipeline, only: tuple[str, ...]) -> list[Target]:
    names = [target.name for target in pipeline.targets]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise BadInput(f"--only {name}: no such target{suggestion(name, names)}" for name in unknown)
    return [target for target in pipeline.targets if not only or target.name in only]


def _resolve(target: Target, pipeline: Pipeline, device: Any) -> tuple[Target, str]:
    if target.format != "auto":
        return target, ""
    file = pipeline.device_file(target)
    profile = device if file is None else read_device(file)
    choice = recommend(profile, target.priority)
    note = "" if choice.verified else " (not verified: this project has not run that format on such a device)"
    return target.resolve(choice.format), f"format auto came to {choice.format}: {choice.reason}{note}"


def to_spec(target: Target) -> TargetSpec:
    """A resolved target as the export stage takes it."""
    isa = target.isa
    if target.format == "tinygemm" and isa == "auto":
        from export.tinygemm import host_isa

        isa = host_isa()  # type: ignore[assignment]
    return TargetSpec(
        name=target.name,
        format=target.format,
        group_size=target.group_size,
        zero=target.zero,
        method=tuple(target.method),
        quality=target.quality or "",
        budget=target.bits_per_weight,
        quantize_head=target.lm_head == "quantize",
        fit_group_size=target.group_size_policy == "largest-fitting",
        skip=tuple(target.skip),
        fused=None if target.qkv is None else target.qkv == "fused",
        isa=isa if target.format == "tinygemm" else "",
    )
