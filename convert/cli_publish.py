"""The commands on finished artifacts: `convert explain` and `convert upload`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from convert.cli_shared import PATH, console, load_pipeline, reports_errors


@click.command()
@click.argument("artifact", type=PATH)
@click.option("--reference", required=True, metavar="SOURCE", help="Folder, hub id, .gguf file or package:NAME.")
@click.option("--text", type=PATH, help="A text file, instead of the text that the artifact was validated on.")
@click.option("--tokens", type=click.IntRange(min=2), default=2048, show_default=True, help="Tokens to look at.")
@click.option("--sequence-length", type=click.IntRange(min=2), help="Tokens per window.")
@click.option(
    "--layers",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="How many layers to restore one by one.",
)
@click.option(
    "--linears",
    type=click.IntRange(min=0),
    default=8,
    show_default=True,
    help="How many linears to restore one by one.",
)
@click.option(
    "--budget",
    type=click.FloatRange(min=0),
    default=0.25,
    show_default=True,
    help="More bits per weight that unquantised linears may cost.",
)
@click.option("--plot", type=PATH, metavar="FILE", help="Draws layers and linears into a .png or .svg file.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@reports_errors
def explain(
    artifact: Path,
    reference: str,
    text: Path | None,
    tokens: int,
    sequence_length: int | None,
    layers: int,
    linears: int,
    budget: float,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Ranks an artifact's layers and linears by the KL divergence that they cause, and says what buys it back.

    The part of every linear comes from one backward pass. The worst layers and linears are measured with the source's
    weights in their place too, and how far the two agree is shown.

    \b
    Example:
      convert explain output/gptq --reference examples/spark-tiny --plot gptq.png
    """
    from convert.against import TextChoice
    from convert.explain import explain_artifact, print_explanation
    from convert.terminal import reporter
    from validate.explain import Checked

    on = TextChoice(text, tokens, sequence_length)
    with reporter(console(stderr=True)) as show:
        found = explain_artifact(artifact, reference, on, Checked(layers, linears), budget, plot, show)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        print_explanation(found, console())
    if plot is not None:
        click.echo(f"{plot}: written", err=as_json)


@click.command()
@click.argument("path", type=PATH)
@click.option("--repo", metavar="OWNER/NAME", help="Where to; {target} in it stands for a target's name.")
@click.option("--create", is_flag=True, help="Makes the repository, or its branch, where there is none.")
@click.option("--private", is_flag=True, help="Only into a private repository.")
@click.option("--revision", metavar="BRANCH", help="The branch, instead of main.")
@click.option(
    "--base-model", metavar="OWNER/NAME", help="The source's id on the hub, where it was not read from there."
)
@click.option("--license", metavar="ID", help="The source's licence, where the source does not state it.")
@click.option("--only", multiple=True, metavar="TARGET", help="Of a pipeline, only this target; may be repeated.")
@click.option("--dry-run", is_flag=True, help="Shows the card and the files, and uploads nothing.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@reports_errors
def upload(path: Path, only: tuple[str, ...], dry_run: bool, as_json: bool, **options: Any) -> None:
    """Uploads an artifact, or every artifact of a pipeline, to the hub, with a model card.

    Refused is what was not validated, failed a gate, or has changed since. The files are read back and compared before
    the branch changes, in one commit; an upload that fails leaves it as it was. What a pipeline's `upload:` says, the
    options replace.

    \b
    Examples:
      convert upload output/gptq --repo someone/model-gptq --create --private
      convert upload pipeline.yaml --repo someone/model-{target} --dry-run
    """
    from convert.terminal import reporter
    from convert.upload import artifact_folders, describe, destination, parcels
    from convert.upload import upload as upload_parcels

    pipeline = None if path.is_dir() else load_pipeline(path, None)
    place, origin = destination(pipeline, options)
    found = parcels(artifact_folders(path, pipeline, only), place, origin)
    if dry_run:
        shown = [describe(parcel) for parcel in found]
        click.echo(json.dumps(shown, indent=2) if as_json else "\n".join(entry["text"] for entry in shown))
        return
    with reporter(console(stderr=True)) as show:
        addresses = upload_parcels(found, show.say)
    click.echo(json.dumps(addresses, indent=2) if as_json else "\n".join(addresses))
