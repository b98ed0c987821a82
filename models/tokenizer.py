"""The tokenizer that lies beside a checkpoint."""

from __future__ import annotations

import json
from typing import Any

from models.checkpoint import Checkpoint
from models.errors import BadInput
from models.skeleton import model_config

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


def load_tokenizer(checkpoint: Checkpoint, allowed_code: tuple[str, ...] = ()) -> Any:
    """The transformers tokenizer among a checkpoint's side files.

    Args:
        allowed_code: names of the Python modules that the tokenizer may bring and run.

    Raises:
        BadInput: when there is none, it cannot be read, or it needs code that was not allowed by name.
    """
    from transformers import AutoTokenizer

    sides = checkpoint.side_files()
    present = [sides[name] for name in FILES if name in sides]
    if not present:
        raise BadInput(f"{checkpoint.name}: expected a tokenizer (one of {', '.join(FILES)}), found none")
    folder = present[0].parent
    needed = _remote_modules(folder / "tokenizer_config.json")
    refused = [module for module in needed if module not in allowed_code]
    if refused:
        raise BadInput(
            f"{checkpoint.name}: the tokenizer runs its own code from {module}.py; allow it by name:"
            f" `model: {{trust_remote_code: [{module}]}}`"
            for module in refused
        )
    # The configuration is given, because transformers would load it with the same trust and run its code as well.
    config = model_config(checkpoint)
    try:
        return AutoTokenizer.from_pretrained(str(folder), config=config, trust_remote_code=bool(needed))
    # What a damaged file breaks in transformers has no type of its own.
    except Exception as error:
        raise BadInput(f"{folder}: the tokenizer cannot be read: {error}") from error


def _remote_modules(file: Any) -> list[str]:
    if not file.is_file():
        return []
    try:
        classes = json.loads(file.read_text(encoding="utf-8")).get("auto_map") or []
        if isinstance(classes, dict):
            classes = classes.get("AutoTokenizer") or []
    except (ValueError, AttributeError) as error:
        raise BadInput(f"{file}: expected a JSON object, found {error}") from error
    names = [classes] if isinstance(classes, str) else classes
    return sorted({name.split("--")[-1].rpartition(".")[0] for name in names if name})
