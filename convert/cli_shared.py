"""What the commands share: how an error ends one, how a pipeline is loaded, how a report is shown."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

if TYPE_CHECKING:
    from rich.console import Console

Command = TypeVar("Command", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
# As shells count a Ctrl-C, and as BSD's sysexits.h numbers an internal error.
INTERRUPTED, BUG = 130, 70


def reports_errors(command: Command) -> Command:
    """Turns the errors meant for users into a message and an exit code; anything else is a bug and shows its trace."""

    @wraps(command)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (click.ClickException, click.Abort, click.exceptions.Exit):
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)
        except Exception as error:
            from models.errors import ConvertError
            from models.files import environment_problem

            known = error if isinstance(error, ConvertError) else environment_problem(error)
            if known is None:
                # Not Python's own exit code 1, which says that a gate failed.
                traceback.print_exc()
                click.echo("error: this is a bug in edge-convert; please report the lines above", err=True)
                sys.exit(BUG)
            for problem in known.problems:
                click.echo(f"error: {problem}", err=True)
            sys.exit(known.exit_code)

    return cast(Command, wrapper)


def load_pipeline(pipeline: Path, work: Path | None) -> Any:
    """The pipeline, with another work folder where one is given."""
    from convert.config import load

    loaded = load(pipeline)
    return loaded.with_work(work) if work is not None else loaded


def console(stderr: bool = False) -> Console:
    """A console; a pipe has no width, and a table must not be folded at 80 columns there."""
    from rich.console import Console

    found = Console(stderr=stderr)
    return found if found.is_terminal else Console(stderr=stderr, width=200)


def show_report(report: Mapping[str, Any], as_json: bool, folder: Path | None) -> None:
    """The report on standard output, as a table or as JSON; then raises what makes the command fail.

    Args:
        folder: where the report's files are, if they were written.
    """
    from convert.judge import raise_failures
    from validate.report import print_table

    if as_json:
        click.echo(json.dumps(report, indent=2))
    elif report:
        print_table(report, console())
        if folder is not None:
            click.echo(f"report: {folder / 'report.json'}, report.html, junit.xml")
    raise_failures(report)
