"""``convert validate``: one artifact against a source, without a pipeline."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from calibrate.text import Text, check_vocabulary, cut_windows, evaluation_windows, load_text, tokenise
from convert.config import Validation
from convert.terminal import Reporter
from export.artifact import Artifact
from models.errors import BadInput
from models.opened import open_model
from models.source import open_source
from models.tokenizer import load_tokenizer
from validate.measure import Settings, measure, measure_reference
from validate.report import ReferenceReport, to_report


def validate_artifact(
    folder: Path,
    reference: str,
    text: Path | None,
    tokens: int | None,
    sequence_length: int | None,
    show: Reporter,
) -> dict[str, Any]:
    """Measures an artifact as `convert run` does, and returns the same report with this one target.

    Args:
        text: a text file; None takes the data set that the artifact's ledger names.
        tokens, sequence_length: None takes the ledger's, else the defaults of ``validation:``.

    Raises:
        BadInput: when the artifact or the reference is damaged, or no text can be found.
    """
    began = time.monotonic()
    artifact = Artifact(folder)
    recorded = (artifact.ledger.validation or {}).get("settings")
    with tempfile.TemporaryDirectory(prefix="convert-") as scratch:
        work = Path(scratch)
        model = open_model(open_source(reference, base=Path.cwd(), side_folder=work / "tokenizer"))
        _check_same_model(artifact, model.checkpoint.config, reference)
        config = _settings(artifact.folder, recorded, text, tokens, sequence_length)
        tokenizer = load_tokenizer(model.checkpoint)
        content = load_text(_text(config, artifact.folder if text is None else Path.cwd()), work / "datasets")
        windows = evaluation_windows(tokenizer, content, config.tokens, config.sequence_length)
        check_vocabulary(tokenizer, windows.ids, model.vocabulary, reference)
        greedy = config.greedy
        settings = Settings(
            windows=windows,
            prompts=cut_windows(tokenise(tokenizer, content), greedy.prompts, greedy.prompt_tokens, "greedy prompts"),
            greedy_tokens=greedy.tokens,
            engine_windows=max(1, config.engine_tokens // config.sequence_length) if config.engine else 0,
            gates={},
            dtype=getattr(torch, artifact.ledger.dtype),
        )
        scored = measure_reference(model.checkpoint, settings, work, show)
        report = measure(artifact, model.checkpoint, scored, settings, show)
    scores = report.scores
    head = ReferenceReport(
        source=reference,
        dtype=artifact.ledger.dtype,
        perplexity=scores.reference_perplexity,
        perplexity_se=scores.reference_perplexity_se,
        windows=scores.windows,
        sequence_length=windows.ids.shape[1],
        tokens=scores.tokens,
        text_sha256=windows.text_sha256,
    )
    return to_report(head, [report.to_dict()], time.monotonic() - began)


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
    if tokens is not None or not values.get("engine", True):
        values.pop("engine_tokens", None)
    context = Path.cwd() if text is not None else folder
    return _validated(values, context)


def _validated(values: dict[str, Any], context: Path) -> Validation:
    from pydantic import ValidationError

    try:
        return Validation.model_validate(values, context=context)
    except ValidationError as error:
        raise BadInput(
            f"validation: {'.'.join(map(str, e['loc']))}: {e['msg']}; pass a text with --text FILE"
            if e["loc"][:1] == ("dataset",)
            else f"validation: {'.'.join(map(str, e['loc']))}: {e['msg']}"
            for e in error.errors()
        ) from error


def _text(config: Validation, base: Path) -> Text:
    dataset = config.dataset
    files = [dataset.data_files] if isinstance(dataset.data_files, str) else dataset.data_files or []
    resolved = tuple(file if "://" in file else str(base / file) for file in files)
    return Text(dataset.path, dataset.name, resolved, dataset.split, dataset.column)
