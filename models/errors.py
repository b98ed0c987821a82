"""The errors that end a run with a message instead of a traceback, and their exit codes."""

from __future__ import annotations

from collections.abc import Iterable


class ConvertError(Exception):
    """An error for the user: every problem found, each one line that names what it is about.

    Attributes:
        problems: one line each; shown together, because fixing one at a time costs a run each.
        exit_code: what the command line ends with.
    """

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class BadInput(ConvertError):
    """Bad input or configuration: exit code 2."""

    exit_code = 2


class EnvironmentProblem(ConvertError):
    """The machine lacks something (disk, memory, an engine): exit code 3."""

    exit_code = 3


class GateFailed(ConvertError):
    """An artifact was written but a validation gate did not hold: exit code 1."""

    exit_code = 1
