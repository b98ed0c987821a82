"""The commands of nightly jobs: `convert nightly`, `convert history` and `convert clean`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from convert.cli_shared import PATH, console, load_pipeline, reports_errors, show_report


@click.command()
@click.argument("pipeline", type=PATH)
@click.option("--only", multiple=True, metavar="TARGET", help="Only this target; may be given several times.")
@click.option("--work", type=PATH, help="The work folder, instead of the file's.")
@click.option("--json", "as_json", is_flag=True, help="For machines: the report instead of the table.")
@reports_errors
def nightly(pipeline: Path, only: tuple[str, ...], work: Path | None, as_json: bool) -> None:
    """Runs what has changed, measures every artifact anew from its bytes, and compares with the history.

    For a cron job or a CI step: exit code 0 when all gates hold; report.json, report.html and junit.xml are in the
    output folder, and the history has an entry for each target.

    \b
    Example:
      convert nightly pipeline.yaml
    """
    from convert.run import run
    from convert.terminal import reporter
    from validate.place import lines

    loaded = load_pipeline(pipeline, work)
    with reporter(console(stderr=True)) as show:
        report = run(loaded, only, False, show, again=True)
        for line in lines(report) if report and not as_json else ():
            show.say(line)
    show_report(report, as_json, loaded.output_folder)


@click.command()
@click.argument("path", type=PATH, default="pipeline.yaml")
@click.option("--target", multiple=True, metavar="TARGET", help="Only this target; may be given several times.")
@click.option("--compare", nargs=2, metavar="ID ID", help="What changed from the first run to the second.")
@click.option("--plot", type=PATH, metavar="FILE.png", help="Draws the trend of every target.")
@click.option("--accept", metavar="ID", help="Later runs may be compared with this one, although a gate failed.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@reports_errors
def history(
    path: Path,
    target: tuple[str, ...],
    compare: tuple[str, str] | None,
    plot: Path | None,
    accept: str | None,
    as_json: bool,
) -> None:
    """Lists the runs of a pipeline, or of a history file, compares two of them, and draws their trend.

    \b
    Examples:
      convert history pipeline.yaml
      convert history output/history.sqlite --compare 2026-01-02-0a1b2c3d 2026-01-03-4e5f6a7b
      convert history pipeline.yaml --plot trend.png
    """
    from convert.history import (
        accept_run,
        compare_runs,
        list_runs,
        open_history,
        plot_trend,
        print_comparison,
        print_runs,
    )

    opened = open_history(path)
    if accept is not None:
        click.echo(accept_run(opened, accept))
    if plot is not None:
        plot_trend(opened, target, plot)
        click.echo(f"{plot}: written", err=as_json)
    if compare is not None:
        found = compare_runs(opened, *compare, target)
        click.echo(json.dumps(found, indent=2)) if as_json else print_comparison(found, console())
    elif accept is None and plot is None:
        runs = list_runs(opened, target)
        click.echo(json.dumps(runs, indent=2)) if as_json else print_runs(runs, console())


@click.command()
@click.argument("pipelines", type=PATH, nargs=-1, required=True, metavar="PIPELINE...")
@click.option("--work", type=PATH, help="The work folder, instead of the files'.")
@click.option("--yes", is_flag=True, help="Removes them; without it they are only listed.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@reports_errors
def clean(pipelines: tuple[Path, ...], work: Path | None, yes: bool, as_json: bool) -> None:
    """Lists intermediate results in the work folder that no run of a pipeline would use any more, and removes them.

    Every change of a pipeline, its texts or its source leaves the results of what it was before. Pipelines that share
    a work folder are named together.

    \b
    Example:
      convert clean pipeline.yaml --yes
    """
    from convert.clean import clean as clean_work
    from convert.estimate import size
    from convert.terminal import reporter

    loaded = [load_pipeline(pipeline, work) for pipeline in pipelines]
    with reporter(console(stderr=True)) as show:
        found = clean_work(loaded, yes, show)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for entry in found:
        click.echo(f"{entry['folder']}: {size(entry['bytes'])}")
    total = size(sum(entry["bytes"] for entry in found))
    click.echo(f"{len(found)} unused stages, {total}: {'removed' if yes else 'pass --yes to remove them'}")
