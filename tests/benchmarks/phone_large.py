"""Memory and time of a random Spark-X2.5 of the 1.7B's shape on its way to a phone, by the command line, in parts.

    python tests/benchmarks/phone_large.py WORK --method rotate,rtn --parts 6

The weights are random, and the tokenizer is the small example's: what is measured is the conversion, not the model. It
ends with 1 when the peak of the process's resident memory is above the bound.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import click
from ruamel.yaml import YAML
from serving import random_spark

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "examples" / "spark-tiny"
TEXT = ROOT / "examples" / "text"
BOUND_GB = 12


def pipeline(work: Path, method: str, parts: int, windows: int, tokens: int) -> Path:
    """Writes the pipeline's file; returns it."""
    source = random_spark(work / "source")
    for file in TOKENIZER.glob("tokenizer*.json"):
        (source / file.name).write_bytes(file.read_bytes())
    content = {
        "model": {"source": "source"},
        "calibration": {
            "dataset": {"path": "text", "data_files": str(TEXT / "calibration.txt")},
            "samples": windows,
            "sequence_length": tokens,
        },
        "targets": [{"format": "phone", "method": method.split(","), "split": {"parts": parts}}],
        "output": "output",
        "work": "work",
    }
    path = work / "pipeline.yaml"
    YAML(typ="safe", pure=True).dump(content, path)
    return path


@click.command()
@click.argument("work", type=click.Path(path_type=Path))
@click.option("--method", default="rotate,rtn", show_default=True)
@click.option("--parts", default=6, show_default=True)
@click.option("--windows", default=2, show_default=True, help="Of calibration text.")
@click.option("--tokens", default=160, show_default=True, help="Of a window.")
def main(work: Path, method: str, parts: int, windows: int, tokens: int) -> None:
    """Prints seconds, CPU seconds and the peak resident memory of one conversion."""
    work.mkdir(parents=True, exist_ok=True)
    path = pipeline(work.absolute(), method, parts, windows, tokens)
    began = time.perf_counter()
    command = [sys.executable, "-m", "convert", "run", path, "--force"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    seconds = time.perf_counter() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Linux counts in kibibytes.
    peak, processor = used.ru_maxrss * 1024 / 1e9, used.ru_utime + used.ru_stime
    written = sum(file.stat().st_size for file in (work / "output" / "phone").iterdir()) / 1e9
    where = f"[{method}], {parts} parts, {windows} windows of {tokens} tokens"
    took = f"{seconds:.0f} s, {processor:.0f} s of CPU"
    click.echo(f"Spark of the 1.7B's shape, {where}: {took}, peak {peak:.1f} GB, {written:.2f} GB written")
    if peak > BOUND_GB:
        raise click.ClickException(f"the peak is above {BOUND_GB} GB")


if __name__ == "__main__":
    main()
