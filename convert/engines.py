"""The `engines` section, and which interpreter an engine runs in: the command line's, the pipeline's, or that of
`make engines`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

from pydantic import ValidationInfo, field_validator

from convert.yaml_lines import Section, Text, broken_rule, folder_of, resolve_path
from models.errors import BadInput, EnvironmentProblem
from validate.engines.check import EngineSpec
from validate.engines.run import ENGINES, check_format, check_processor, installed_version

# What `make engines` builds, below the folder where the command is given.
BUILT = Path(".venv-engines/bin/python")


class Engine(Section):
    """An engine's environment: ``python`` is its interpreter."""

    python: Text

    @field_validator("python")
    @classmethod
    def _python_exists(cls, python: str, info: ValidationInfo) -> str:
        path = resolve_path(python, folder_of(info))
        if not path.is_file():
            raise broken_rule(f"no such file: {path}")
        return python


class VllmEngine(Engine):
    """vLLM; ``w4a8``: its kernel with 8-bit activations, where the machine has AMX (``auto``), always or never."""

    w4a8: Literal["auto", "on", "off"] = "auto"


class Engines(Section):
    """Where the engines are that run artifacts."""

    vllm: VllmEngine | None = None
    gptqmodel: Engine | None = None
    transformers: Engine | None = None
    onnxruntime: Engine | None = None
    qnn: Engine | None = None


def find_engines(
    names: list[str],
    formats: list[str],
    python: Path | None = None,
    section: Engines | None = None,
    base: Path | None = None,
) -> tuple[EngineSpec, ...]:
    """The engines, each seen to be installed and to have a kernel for this processor.

    Args:
        formats: of the artifacts; each engine must load one of them.
        python: an interpreter that goes before everything else, for a single engine.
        section: a pipeline's ``engines``, whose relative paths start at ``base``.

    Raises:
        BadInput: for an engine that none of the artifacts is for.
        EnvironmentProblem: for engines that are not installed, with the lines that install them, or have no kernel for
            this processor.
    """
    problems: list[BadInput | EnvironmentProblem] = []
    found = []
    for name in dict.fromkeys(names):
        settings: Engine | None = getattr(section, name, None)
        try:
            loaded = [format for format in dict.fromkeys(formats) if format in ENGINES[name].formats]
            if not loaded:
                check_format(name, formats[0])
            for format in loaded:
                check_processor(name, format)
            chosen = python or _interpreter(name, settings, base)
            w4a8 = settings.w4a8 if isinstance(settings, VllmEngine) else "auto"
            found.append(EngineSpec(name, chosen, installed_version(name, chosen), w4a8))
        except (BadInput, EnvironmentProblem) as problem:
            problems.append(problem)
    if problems:
        # What the machine lacks does not matter where the input is wrong.
        kind = BadInput if any(isinstance(problem, BadInput) for problem in problems) else EnvironmentProblem
        raise kind(line for problem in problems for line in problem.problems)
    return tuple(found)


def _interpreter(engine: str, settings: Engine | None, base: Path | None) -> Path:
    if settings is not None:
        return resolve_path(settings.python, base or Path.cwd())
    if engine in ("transformers", "onnxruntime"):
        # They are dependencies of this project.
        return Path(sys.executable)
    if BUILT.is_file():
        return BUILT.absolute()
    if engine == "qnn":
        # An extra of this project.
        return Path(sys.executable)
    raise EnvironmentProblem(
        f"engine {engine}: no environment for it: {ENGINES[engine].install}; then name its interpreter with"
        f" --engine-python, or in the pipeline: `engines: {{{engine}: {{python: PATH}}}}`"
    )
