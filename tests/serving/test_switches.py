"""The inventory of environment variables is complete, and says why each one is there."""

from __future__ import annotations

import ast
import re

import pytest

from export.serving.switches import SWITCHES, WIDE_ROWS
from models.errors import BadInput
from tests.helpers import ROOT

FILES = sorted((ROOT / "export" / "serving").glob("*.py"))
ALLOWED = "switches.py"


def environment_reads(source: str) -> list[int]:
    """Lines that touch the environment, whatever name it goes by."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"))
        or (isinstance(node, ast.ImportFrom) and node.module == "os")
    ]


def test_only_the_inventory_reads_the_environment() -> None:
    assert len(FILES) > 5
    found = {file.name: environment_reads(file.read_text(encoding="utf-8")) for file in FILES}
    assert found.pop(ALLOWED)
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line", ['os.environ["X"]', 'os.getenv("X")', "os.environ.get('X')", "from os import environ", "x = os.environb"]
)
def test_a_read_elsewhere_would_be_found(line: str) -> None:
    assert environment_reads(line)


def test_every_name_in_the_code_stands_in_the_inventory() -> None:
    named = {name for file in FILES for name in re.findall(r"EDGE_CONVERT_\w+", file.read_text(encoding="utf-8"))}
    assert named == {switch.name for switch in SWITCHES}


def test_every_switch_says_why_and_what_was_measured() -> None:
    for switch in SWITCHES:
        assert switch.why and re.search(r"\d", switch.measured), switch.name
        assert switch.read() == switch.default


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
def test_a_value_that_a_switch_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch, switch: object) -> None:
    for value in ("", "0", "yes", "-1", "1.5"):
        monkeypatch.setenv(switch.name, value)  # type: ignore[attr-defined]
        with pytest.raises(BadInput, match=switch.name):  # type: ignore[attr-defined]
            switch.read()  # type: ignore[attr-defined]


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WIDE_ROWS.name, "17")
    assert WIDE_ROWS.read() == "17"
