"""The command line. Nothing heavy is imported until a command runs, so that ``--help`` is instant."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, cast

import click
from click.core import ParameterSource

from convert.cli_history import clean, history, nightly
from convert.cli_publish import explain, upload
from convert.cli_shared import PATH, console, load_pipeline, reports_errors, show_report

# Before torch is imported. On a machine that does other work too, OpenMP threads that spin at a barrier take the
# very cores that they wait for (measured on two busy cores: the search 12 to 36 times slower).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The names of validate.engines, without its imports; a test compares them.
ENGINES = ("vllm", "gptqmodel", "transformers", "onnxruntime", "qnn")


def _shard_bytes(context: click.Context, parameter: click.Parameter, value: str) -> int:
    from pydantic import ValidationError

    from convert.config import Output

    try:
        return Output(shard_size=value).shard_bytes
    except ValidationError as error:
        raise click.BadParameter(f"{error.errors()[0]['msg']}, found {value!r}") from error


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="edge-convert")
def main() -> None:
    """Turns a Hugging Face causal language model into the weights that each class of edge device runs fastest, and
    measures what each build lost.

    \b
    Example:
      convert plan pipeline.yaml      what would happen
      convert run pipeline.yaml       do it

    Exit codes: 0 good, 1 a validation gate failed, 2 bad input or configuration, 3 the machine lacks something,
    70 a bug in this program, 130 interrupted.
    """


@main.command()
@click.argument("pipeline", type=PATH)
@click.option("--only", multiple=True, metavar="TARGET", help="Only this target; may be given several times.")
@click.option("--force", is_flag=True, help="Do every stage again, and take over an output folder of another run.")
@click.option("--work", type=PATH, help="The work folder, instead of the file's.")
@click.option("--upload", "uploads", is_flag=True, help="Uploads what held its gates, where `upload:` says.")
@click.option("--json", "as_json", is_flag=True, help="For machines: the report instead of the table.")
@reports_errors
def run(pipeline: Path, only: tuple[str, ...], force: bool, work: Path | None, uploads: bool, as_json: bool) -> None:
    """Runs a pipeline: open, split, calibrate, export, validate, and upload when asked.

    A run that was killed continues where it stopped when the same command is given again.

    \b
    Example:
      convert run pipeline.yaml --only gptq
    """
    from convert.run import run as run_pipeline
    from convert.terminal import reporter

    loaded = load_pipeline(pipeline, work)
    if uploads:
        from convert.upload import check_before_run

        check_before_run(loaded, only)
    with reporter(console(stderr=True)) as show:
        report = run_pipeline(loaded, only, force, show)
    show_report(report, as_json, loaded.output_folder)
    if uploads:
        from convert.upload import upload_pipeline

        with reporter(console(stderr=True)) as show:
            addresses = upload_pipeline(loaded, only, show.say)
        click.echo("\n".join(addresses), err=as_json)


@main.command()
@click.argument("pipeline", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@reports_errors
def plan(pipeline: Path, as_json: bool) -> None:
    """Says what a run would do, from headers alone: linears quantised and kept, sizes, memory and disk.

    \b
    Example:
      convert plan pipeline.yaml
    """
    from convert.estimate import estimate
    from convert.inspect import plan_to_dict, print_plan
    from convert.prepare import prepare

    prepared = prepare(load_pipeline(pipeline, None))
    needs = estimate(prepared)
    if as_json:
        click.echo(json.dumps(plan_to_dict(prepared, needs), indent=2))
    else:
        print_plan(prepared, needs, console())


@main.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@reports_errors
def inspect(path: str, as_json: bool) -> None:
    """Shows what a source or an artifact holds: scheme, tensors, ledger and sizes.

    \b
    Examples:
      convert inspect examples/spark-tiny
      convert inspect output/gptq
    """
    from convert.inspect import inspect_path, print_inspection

    found = inspect_path(path)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        print_inspection(found, console())


@main.command()
@click.argument("artifact", type=PATH)
@click.argument("out", type=PATH)
@click.option("--shard-size", default="2GB", show_default=True, callback=_shard_bytes, help="Largest weight file.")
@reports_errors
def expand(artifact: Path, out: Path, shard_size: int) -> None:
    """Writes an artifact's weights as a plain checkpoint that AutoModelForCausalLM.from_pretrained loads.

    \b
    Example:
      convert expand output/gptq expanded/gptq
    """
    from export.opened import expansion_of, open_artifact, save
    from models.errors import BadInput

    if out.exists():
        raise BadInput(f"{out}: already there; name a new folder")
    opened = open_artifact(artifact)
    opened.check()
    expansion = expansion_of(opened)
    save(expansion, out, shard_size)
    click.echo(f"{out}: {len(expansion.tensors)} tensors")


# What a pipeline says itself.
ARTIFACT_ONLY = ("reference", "text", "tokens", "sequence_length", "engine", "engine_python", "pipeline", "report")


@main.command()
@click.argument("path", type=PATH)
@click.option("--reference", metavar="SOURCE", help="Folder, hub id, .gguf file or package:NAME.")
@click.option("--text", type=PATH, help="A text file, instead of the text that the artifact was validated on.")
@click.option("--tokens", type=click.IntRange(min=2), help="Tokens to score.")
@click.option("--sequence-length", type=click.IntRange(min=2), help="Tokens per window.")
@click.option("--engine", multiple=True, type=click.Choice(ENGINES), help="Runs it too; may be given several times.")
@click.option("--engine-python", type=PATH, help="The interpreter of that engine's environment.")
@click.option("--pipeline", type=PATH, help="A pipeline.yaml whose `engines:` say where they are.")
@click.option("--report", type=PATH, metavar="FOLDER", help="Writes report.json, report.html and junit.xml there.")
@click.option("--only", multiple=True, metavar="TARGET", help="Of a pipeline, only this target; may be repeated.")
@click.option("--work", type=PATH, help="Of a pipeline, the work folder, instead of the file's.")
@click.option("--json", "as_json", is_flag=True, help="For machines: the report instead of the table.")
@click.pass_context
@reports_errors
def validate(
    context: click.Context, path: Path, only: tuple[str, ...], work: Path | None, as_json: bool, **options: Any
) -> None:
    """Measures an artifact, or every artifact of a pipeline, from its bytes against the model it was made from.

    Of a pipeline, artifacts whose bytes are not those that were written are refused, the gates judge, and the output
    folder gets report.json, report.html and junit.xml.

    An engine is looked for where --engine-python or the pipeline says, else in .venv-engines below the current
    folder, which `make engines` builds.

    \b
    Examples:
      convert validate pipeline.yaml
      convert validate output/gptq --reference examples/spark-tiny --text examples/text/evaluation.txt
      convert validate output/gptq --reference examples/spark-tiny --engine vllm
    """
    from convert.terminal import reporter

    given = {name for name in context.params if context.get_parameter_source(name) != ParameterSource.DEFAULT}
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        _refuse(given & set(ARTIFACT_ONLY), "only for an artifact; the pipeline says it itself")
        from convert.validate import validate_pipeline

        loaded = load_pipeline(path, work)
        with reporter(console(stderr=True)) as show:
            report = validate_pipeline(loaded, only, show)
        show_report(report, as_json, loaded.output_folder)
        return
    _refuse(given & {"only", "work"}, "only for a pipeline")
    if options["reference"] is None:
        raise click.UsageError("--reference: an artifact needs the model that it was made from")
    if options["engine_python"] is not None and len(options["engine"]) != 1:
        raise click.UsageError("--engine-python: needs exactly one --engine")
    from convert.against import TextChoice
    from convert.validate import validate_artifact

    text = TextChoice(options["text"], options["tokens"], options["sequence_length"])
    with reporter(console(stderr=True)) as show:
        report = validate_artifact(
            path,
            options["reference"],
            text,
            show,
            options["engine"],
            options["engine_python"],
            options["pipeline"],
            options["report"],
        )
    show_report(report, as_json, options["report"])


def _refuse(options: set[str], why: str) -> None:
    if options:
        names = ", ".join("--" + name.replace("_", "-") for name in sorted(options))
        raise click.UsageError(f"{names}: {why}")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="The profile alone, as `targets: {device: FILE}` takes it.")
@click.option("--priority", type=click.Choice(["speed", "fidelity"]), default="speed", show_default=True)
@reports_errors
def probe(as_json: bool, priority: str) -> None:
    """Says what this machine can run, and which format suits it.

    \b
    Example:
      convert probe --json > device.json
    """
    from convert.device import probe as probe_device
    from convert.device import recommend

    device = probe_device()
    choice = recommend(device, cast(Any, priority))
    if as_json:
        click.echo(device.to_json(), nl=False)
        return
    for name, value in device.model_dump().items():
        click.echo(f"{name}: {value}")
    click.echo(f"recommended for {priority}: {choice.format}: {choice.reason}")
    if not choice.verified:
        click.echo("not verified: this project has not run that format on such a device")


main.add_command(nightly)
main.add_command(history)
main.add_command(clean)
main.add_command(explain)
main.add_command(upload)
