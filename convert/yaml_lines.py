"""Reads a yaml (or json) file into typed models, and says of every problem where in the file it stands.

pydantic finds the problems; ruamel.yaml knows the lines; this module brings the two together and words each problem as
``file:line: key: what is wrong``.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails, PydanticCustomError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode
from ruamel.yaml.reader import ReaderError

from models.errors import BadInput

Location = tuple[str | int, ...]
Problem = tuple[Location, str]
Text = Annotated[str, Field(min_length=1)]
SectionType = TypeVar("SectionType", bound="Section")

# pydantic's error types, and what they expected in words of a yaml file; braces are filled from the error's context.
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "expected": "{expected}",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "int_type": "a whole number",
    "less_than_equal": "at most {le:g}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_type": "a mapping",
    "string_too_short": "text",
    "string_type": "text",
    "too_short": "at least {min_length} in the list",
}


class Section(BaseModel):
    """A part of a file: its keys are this class's fields, no others, each of exactly its type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def folder_of(info: ValidationInfo) -> Path:
    """For validators: the folder of the file that is validated, where its relative paths start."""
    return info.context or Path.cwd()


def resolve_path(raw: str, folder: Path) -> Path:
    """A path of a file as an absolute one: relative ones start at the file's folder."""
    return Path(os.path.normpath(folder / Path(raw).expanduser()))


def is_path(raw: str, folder: Path) -> bool:
    """Whether a name that could also be a hub id means something on this machine."""
    return raw.startswith((".", "/", "~")) or raw.endswith(".gguf") or resolve_path(raw, folder).exists()


def list_of_one(value: Any) -> Any:
    """A single text as a list of one; anything else as it is."""
    return [value] if isinstance(value, str) else value


def is_names(value: Any) -> bool:
    """Whether it is a list of texts that are not empty."""
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def expected(what: str) -> PydanticCustomError:
    """For validators: the value is not what the key takes; the message shows the value."""
    return PydanticCustomError("expected", "expected {expected}", {"expected": what})


def broken_rule(reason: str) -> PydanticCustomError:
    """For validators: the value is possible, but not here; the message is the reason."""
    return PydanticCustomError("rule", "{reason}", {"reason": reason})


def broken_rules(reasons: Mapping[str, str]) -> PydanticCustomError:
    """For validators of a section: several of its keys break a rule; each is reported at its own line."""
    return PydanticCustomError("rules", "broken rules", {"reasons": dict(reasons)})


@dataclass(frozen=True)
class Document:
    """A file's content and the line of every key and list item in it.

    Attributes:
        name: the file as the user named it.
        data: plain dicts, lists and scalars.
        lines: 1-based line per location.
    """

    name: str
    data: Any
    lines: dict[Location, int]

    def line(self, location: Location) -> int:
        """The line of a key, or of the nearest section around a key that is not in the file."""
        while location and location not in self.lines:
            location = location[:-1]
        return self.lines.get(location, 1)

    def validate(self, section: type[SectionType], more: Iterable[Problem] = ()) -> SectionType:
        """The typed content; raises BadInput with every problem, those in ``more`` included, in the file's order.

        Relative paths in it start at the file's folder.
        """
        problems = list(more)
        try:
            result = section.model_validate(self.data, context=Path(self.name).absolute().parent)
        except ValidationError as error:
            problems += explain(error, section)
        if problems:
            problems.sort(key=lambda problem: self.line(problem[0]))
            raise BadInput([f"{self.name}:{self.line(where)}: {_at(where)}{what}" for where, what in problems])
        return result


def read(path: Path) -> Document:
    """Reads one yaml document; raises BadInput when there is none to read or its syntax is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: expected UTF-8 text, found byte {error.object[error.start]:#04x}") from error
    lines: dict[Location, int] = {}
    try:
        root = YAML(typ="safe", pure=True).compose(text)
        if root is not None:
            for location, line in _walk(root, (), ()):
                lines.setdefault(location, line)
        data = YAML(typ="safe", pure=True).load(text)
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise BadInput(f"{path}:{line}: yaml: a character that yaml does not allow") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        begun = error.context_mark
        since = f" ({error.context} begun on line {begun.line + 1})" if begun and begun is not mark else ""
        raise BadInput(f"{path}:{mark.line + 1 if mark else 1}: yaml: {error.problem}{since}") from error
    except YAMLError as error:
        raise BadInput(f"{path}:1: yaml: {error}") from error
    return Document(str(path), data, lines)


def explain(error: ValidationError, section: type[Section]) -> list[Problem]:
    """pydantic's errors as locations and messages for the person who wrote the file."""
    problems: list[Problem] = []
    guesses: set[Location] = set()
    for detail in error.errors(include_url=False):
        where = detail["loc"]
        if detail["type"] == "extra_forbidden":
            known = list(_section_at(section, where[:-1]).model_fields)
            guess = _closest(str(where[-1]), known)
            if guess:
                guesses.add((*where[:-1], guess))
            hint = f"did you mean '{guess}'?" if guess else f"known keys: {', '.join(known)}"
            problems.append((where, f"unknown key; {hint}"))
        elif detail["type"] == "rules":
            problems += [((*where, key), reason) for key, reason in detail["ctx"]["reasons"].items()]
        # A default that follows from a broken value is no problem of its own.
        elif detail["type"] != "default_factory_not_called":
            problems.append((where, _message(detail)))
    # A misspelt required key is one mistake: the missing one is already named by its "did you mean".
    return [problem for problem in problems if not (problem[0] in guesses and problem[1] == _MISSING)]


_MISSING = "this key is required, and missing"


def _message(detail: ErrorDetails) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "missing":
        return _MISSING
    if kind == "invalid_key":
        return "expected a key that is text"
    if kind not in _EXPECTED:
        return detail["msg"]
    message = f"expected {_EXPECTED[kind].format(**detail.get('ctx', {}))}, found {_shown(value)}"
    if kind == "string_type" and value is not None and not isinstance(value, list | dict):
        message += " (quotes make it text)"
    if kind == "literal_error" and isinstance(value, str):
        guess = _closest(value, re.findall(r"'([^']*)'", detail["ctx"]["expected"]))
        message += f"; did you mean '{guess}'?" if guess else ""
    return message


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    if isinstance(value, dict):
        return "a mapping"
    return repr(value) if isinstance(value, str) else str(value)


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when one of the known words is close, else the list of them."""
    words = list(known)
    guess = _closest(word, words)
    return f"; did you mean '{guess}'?" if guess else f"; known: {', '.join(words)}"


def _closest(word: str, known: list[str]) -> str | None:
    names = {name.lower(): name for name in known}
    return next((names[found] for found in difflib.get_close_matches(word.lower(), names, n=1)), None)


def _section_at(section: type[Section], location: Location) -> type[Section]:
    """The class whose keys stand at a location: list indices stay within a field's type."""
    for key in location:
        if isinstance(key, str):
            section = next(_sections(section.model_fields[key].annotation))
    return section


def _sections(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for inner in get_args(annotation):
        yield from _sections(inner)


def _at(location: Location) -> str:
    text = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in location)
    return f"{text.removeprefix('.')}: " if text else ""


def _walk(node: Node, location: Location, above: tuple[Node, ...]) -> Iterator[tuple[Location, int]]:
    """Every location below a node with its line; a key's own line comes before one that `<<` merges in."""
    if node in above:
        raise MarkedYAMLError(problem="an alias inside its own anchor", problem_mark=node.start_mark)
    above = (*above, node)
    if isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            yield (*location, index), item.start_mark.line + 1
            yield from _walk(item, (*location, index), above)
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            yield (*location, key.value), key.start_mark.line + 1
            yield from _walk(value, (*location, key.value), above)
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                for source in value.value if isinstance(value, SequenceNode) else [value]:
                    yield from _walk(source, location, above)
