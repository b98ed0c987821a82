"""Artifacts of every format: opened, and seen as plain checkpoints."""

from __future__ import annotations

from pathlib import Path

from export.artifact import Artifact
from export.phone.artifact import PhoneArtifact, is_phone

AnyArtifact = Artifact | PhoneArtifact


def open_artifact(folder: Path) -> AnyArtifact:
    """Raises BadInput when the folder is not a whole artifact."""
    return PhoneArtifact(folder) if is_phone(folder) else Artifact(folder)
