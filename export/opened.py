"""Artifacts of every format: opened, and seen as plain checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

from export.artifact import Artifact, Expansion
from export.phone.artifact import PhoneArtifact, is_phone
from export.phone.expand import PhoneExpansion
from models.checkpoint import Checkpoint, Writer
from models.files import atomic_folder, to_json

AnyArtifact = Artifact | PhoneArtifact


def open_artifact(folder: Path) -> AnyArtifact:
    """Raises BadInput when the folder is not a whole artifact."""
    return PhoneArtifact(folder) if is_phone(folder) else Artifact(folder)


def expansion_of(artifact: AnyArtifact) -> Checkpoint:
    """The artifact as a plain checkpoint, its weights dequantised when they are read."""
    return PhoneExpansion(artifact) if isinstance(artifact, PhoneArtifact) else Expansion(artifact)


def save(expansion: Checkpoint, folder: Path, shard_bytes: int) -> None:
    """Writes a plain checkpoint that ``AutoModelForCausalLM.from_pretrained`` loads; whole or not at all."""
    with atomic_folder(folder) as partial:
        writer = Writer(partial, shard_bytes)
        for name in expansion.tensors:
            writer.add(name, expansion.read(name))
        writer.finish()
        (partial / "config.json").write_bytes(to_json(expansion.config))
        for file, path in expansion.side_files().items():
            shutil.copyfile(path, partial / file)
