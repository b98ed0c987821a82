"""``conversion.json``: what became of every source tensor, and everything that decided the artifact's content."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from models.errors import BadInput
from models.files import replace_file, sha256, to_json

FILE = "conversion.json"
SCHEMA = 1
PACKAGES = ("edge-convert", "torch", "transformers", "safetensors", "numpy", "datasets")


@dataclass
class LinearRow:
    """How one linear was quantised.

    Attributes:
        module: where the artifact stores it.
        rows: first and last-plus-one output channel within that module.
        error: relative output error, see `calibrate.search.error`.
        reason: why it was rounded to nearest although the target asks for more; empty when it was not.
    """

    linear: str
    module: str
    rows: tuple[int, int]
    method: tuple[str, ...]
    group_size: int
    zero: str
    error: float
    reason: str = ""


@dataclass
class TensorRow:
    """What became of one source tensor.

    Attributes:
        outcome: ``quantized``, ``kept``, ``split`` (a fused bias), ``tied`` (a head that has no tensor of its own,
            here as in the source) or ``dropped`` (a buffer that models compute from the configuration).
        stored_as: tensors or modules of the artifact that hold it now.
        reason: why it was kept, cast or tied.
        skipped: how many of its numbers are of linears that `skip`, or a budget, left in the artifact's dtype.
    """

    tensor: str
    shape: tuple[int, ...]
    dtype: str
    outcome: Literal["quantized", "kept", "split", "tied", "dropped"]
    stored_as: tuple[str, ...] = ()
    reason: str = ""
    linears: tuple[LinearRow, ...] = ()
    skipped: int = 0


@dataclass
class Ledger:
    """The whole record. ``files`` are the artifact's own, so later changes to its bytes are seen; ``links`` say of each
    link that the method `awq` looked at what it found (`calibrate.results.QuantizedLayer.links`), and ``precision`` of
    each linear what a budget of bits was spent by (`validate.precision.Row`)."""

    source: dict[str, Any]
    target: dict[str, Any]
    notes: tuple[str, ...]
    tensors: list[TensorRow]
    skipped_files: dict[str, str]
    source_config: dict[str, Any]
    dtype: str
    calibration: dict[str, Any] | None = None
    device: dict[str, Any] | None = None
    versions: dict[str, str] = field(default_factory=lambda: versions())
    files: dict[str, str] = field(default_factory=dict)
    validation: dict[str, Any] | None = None
    links: list[dict[str, Any]] = field(default_factory=list)
    precision: list[dict[str, Any]] = field(default_factory=list)
    schema: int = SCHEMA

    def write(self, folder: Path) -> None:
        """Writes (or replaces) the ledger of an artifact."""
        replace_file(folder / FILE, to_json(asdict(self)))

    @staticmethod
    def read(folder: Path) -> Ledger:
        """The ledger of an artifact. Raises BadInput when there is none, or it is of another schema."""
        path = folder / FILE
        if not path.is_file():
            raise BadInput(f"{path}: expected an artifact's ledger, found no such file")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.get("schema") != SCHEMA:
                raise BadInput(f"{path}: schema: expected {SCHEMA}, found {data.get('schema')!r}")
            data["notes"] = tuple(data["notes"])
            data["tensors"] = [_tensor_row(row) for row in data["tensors"]]
            return Ledger(**data)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BadInput(f"{path}: not a readable ledger: {error!r}") from error

    def file_problems(self, folder: Path) -> list[str]:
        """Files of an artifact that are not there, or not as they were written."""
        problems = []
        for file, digest in self.files.items():
            if not (folder / file).is_file():
                problems.append(f"{file}: named in the ledger, but there is no such file")
            elif sha256(folder / file) != digest:
                problems.append(f"{file}: its bytes are not those that were written (SHA-256 differs from the ledger)")
        return problems


def _tensor_row(row: Mapping[str, Any]) -> TensorRow:
    linears = tuple(
        LinearRow(**{**linear, "rows": tuple(linear["rows"]), "method": tuple(linear["method"])})
        for linear in row["linears"]
    )
    shape, stored_as = tuple(row["shape"]), tuple(row["stored_as"])
    return TensorRow(**{**row, "shape": shape, "stored_as": stored_as, "linears": linears})


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def missing_rows(ledger: Ledger, tensors: Iterable[str]) -> list[str]:
    """Source tensors without a row: a bug that must fail the run."""
    rows = {row.tensor for row in ledger.tensors}
    return [name for name in tensors if name not in rows]
