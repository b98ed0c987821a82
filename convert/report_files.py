"""The files of a report: ``report.json`` for programs, ``report.html`` for people, ``junit.xml`` for CI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from export.opened import AnyArtifact
from models.files import replace_file, to_json
from validate.entry import Entry
from validate.junit import to_junit
from validate.page import to_page

REPORT, PAGE, JUNIT = "report.json", "report.html", "junit.xml"


def write_reports(
    folder: Path, report: Mapping[str, Any], artifacts: Sequence[AnyArtifact], earlier: Sequence[Entry] = ()
) -> None:
    """Replaces each of the files whole; ``report.json`` last, so that where it is new the others are."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / JUNIT, to_junit(report))
    replace_file(folder / PAGE, to_page(report, artifacts, earlier).encode())
    replace_file(folder / REPORT, to_json(report))
