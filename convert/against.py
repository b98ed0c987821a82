"""An artifact beside the model that it was made from, on a text: where `validate` and `explain` of one start."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from convert.prepare import read_text, validation_settings
from convert.sections import Validation
from convert.yaml_lines import explain
from export.opened import AnyArtifact
from models.errors import BadInput
from models.opened import OpenedModel, open_model
from models.source import open_source
from models.tokenizer import load_tokenizer
from validate.engines.check import EngineSpec
from validate.measure import Settings


@dataclass(frozen=True)
class TextChoice:
    """What to measure on: a text file, tokens and tokens per window; None takes what the artifact's ledger names, else
    the defaults of ``validation:``."""

    file: Path | None = None
    tokens: int | None = None
    sequence_length: int | None = None


@dataclass(frozen=True)
class Against:
    """A reference, opened, and how an artifact is compared with it.

    Attributes:
        work: a folder that is gone at the end.
    """

    model: OpenedModel
    settings: Settings
    work: Path


@contextmanager
def opened_against(
    artifact: AnyArtifact, reference: str, text: TextChoice, engines: tuple[EngineSpec, ...] = ()
) -> Iterator[Against]:
    """Opens a reference for an artifact, for the length of the block.

    Raises:
        BadInput: when the reference is damaged or of another model, or no text can be found.
    """
    recorded = (artifact.ledger.validation or {}).get("settings")
    with tempfile.TemporaryDirectory(prefix="convert-") as scratch:
        work = Path(scratch)
        model = open_model(open_source(reference, base=Path.cwd(), side_folder=work / "tokenizer"))
        check_same_model(artifact, model.checkpoint.config, reference)
        config = recorded_validation(artifact.folder, recorded, text)
        base = Path.cwd() if text.file is not None else artifact.folder
        settings = validation_settings(
            config,
            read_text(config.dataset, base, work / "datasets"),
            load_tokenizer(model.checkpoint),
            model,
            artifact.dtype,
            engines,
        )
        yield Against(model, settings, work)


def check_same_model(artifact: AnyArtifact, config: dict[str, Any], reference: str) -> None:
    """The shapes that must agree for logits to be comparable."""
    keys = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    problems = [
        f"{reference}: config.json: {key}: expected {artifact.model_config.get(key)!r} as in the artifact,"
        f" found {config.get(key)!r}"
        for key in keys
        if artifact.model_config.get(key) != config.get(key)
    ]
    if problems:
        raise BadInput(problems)


def recorded_validation(folder: Path, recorded: dict[str, Any] | None, text: TextChoice) -> Validation:
    """A ledger's ``validation:``, with what is asked for instead."""
    values = dict(recorded or {})
    if text.file is not None:
        values["dataset"] = {"path": "text", "data_files": str(text.file)}
    if "dataset" not in values:
        raise BadInput(f"{folder}: the ledger names no validation text; pass one with --text FILE")
    asked = {"tokens": text.tokens, "sequence_length": text.sequence_length}
    values |= {key: value for key, value in asked.items() if value is not None}
    if text.tokens is not None or text.sequence_length is not None or not values.get("engine", True):
        values.pop("engine_tokens", None)
    try:
        return Validation.model_validate(values, context=Path.cwd() if text.file is not None else folder)
    except ValidationError as error:
        problems = explain(error, Validation)
        raise BadInput(
            f"{folder}: the ledger's validation text: {what}; pass one with --text FILE"
            if text.file is None and where[:1] == ("dataset",)
            else f"{'.'.join(map(str, where))}: {what}"
            for where, what in problems
        ) from error
