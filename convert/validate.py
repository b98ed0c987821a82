"""``convert validate``: one artifact against a source, without a pipeline."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from convert.config import Validation, load
from convert.engines import find_engines
from convert.prepare import read_text, validation_settings
from convert.terminal import Reporter
from convert.yaml_lines import explain
from export.artifact import Artifact
from models.errors import BadInput
from models.opened import open_model
from models.source import open_source
from models.tokenizer import load_tokenizer
from validate.engines.check import EngineSpec
from validate.measure import measure, measure_reference
from validate.report import to_report


def validate_artifact(
    folder: Path,
    reference: str,
    text: Path | None,
    tokens: int | None,
    sequence_length: int | None,
    show: Reporter,
    engines: Sequence[str] = (),
    engine_python: Path | None = None,
    pipeline: Path | None = None,
) -> dict[str, Any]:
    """Measures an artifact as `convert run` does, and returns the same report with this one target.

    Args:
        text: a text file; None takes the data set that the artifact's ledger names.
        tokens, sequence_length: None takes the ledger's, else the defaults of ``validation:``.
        engines: that run the artifact too.
        engine_python: the interpreter of the one engine.
        pipeline: a pipeline.yaml whose ``engines`` say where they are.

    Raises:
        EnvironmentProblem: when an engine is not installed.
        BadInput: when the artifact or the reference is damaged, or no text can be found.
    """
    began = time.monotonic()
    artifact = Artifact(folder)
    artifact.check()
    specs = _engines(artifact, engines, engine_python, pipeline)
    recorded = (artifact.ledger.validation or {}).get("settings")
    with tempfile.TemporaryDirectory(prefix="convert-") as scratch:
        work = Path(scratch)
        model = open_model(open_source(reference, base=Path.cwd(), side_folder=work / "tokenizer"))
        _check_same_model(artifact, model.checkpoint.config, reference)
        config = _settings(artifact.folder, recorded, text, tokens, sequence_length)
        text_base = Path.cwd() if text is not None else artifact.folder
        settings = validation_settings(
            config,
            read_text(config.dataset, text_base, work / "datasets"),
            load_tokenizer(model.checkpoint),
            model,
            artifact.dtype,
            specs,
        )
        scored = measure_reference(model.checkpoint, settings, work, show)
        measured = measure(artifact, model.checkpoint, scored, settings, show)
    return to_report(reference, settings, [(artifact, measured)], time.monotonic() - began)


def _engines(
    artifact: Artifact, names: Sequence[str], python: Path | None, pipeline: Path | None
) -> tuple[EngineSpec, ...]:
    loaded = load(pipeline) if pipeline is not None else None
    return find_engines(
        list(names),
        [artifact.layout.FORMAT],
        python,
        loaded.engines if loaded else None,
        loaded.folder if loaded else None,
    )


def _check_same_model(artifact: Artifact, config: dict[str, Any], reference: str) -> None:
    """The shapes that must agree for logits to be comparable."""
    keys = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    problems = [
        f"{reference}: config.json: {key}: expected {artifact.files.config.get(key)!r} as in the artifact,"
        f" found {config.get(key)!r}"
        for key in keys
        if artifact.files.config.get(key) != config.get(key)
    ]
    if problems:
        raise BadInput(problems)


def _settings(
    folder: Path, recorded: dict[str, Any] | None, text: Path | None, tokens: int | None, sequence_length: int | None
) -> Validation:
    values = dict(recorded or {})
    if text is not None:
        values["dataset"] = {"path": "text", "data_files": str(text)}
    if "dataset" not in values:
        raise BadInput(f"{folder}: the ledger names no validation text; pass one with --text FILE")
    if sequence_length is not None:
        values["sequence_length"] = sequence_length
    if tokens is not None:
        values["tokens"] = tokens
    if tokens is not None or sequence_length is not None or not values.get("engine", True):
        values.pop("engine_tokens", None)
    try:
        return Validation.model_validate(values, context=Path.cwd() if text is not None else folder)
    except ValidationError as error:
        problems = explain(error, Validation)
        raise BadInput(
            f"{folder}: the ledger's validation text: {what}; pass one with --text FILE"
            if text is None and where[:1] == ("dataset",)
            else f"{'.'.join(map(str, where))}: {what}"
            for where, what in problems
        ) from error
