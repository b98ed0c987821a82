"""Scoring layer by layer beside one forward pass of the whole model: python tests/benchmarks/scorer.py [SOURCE]

Prints seconds and peak memory of each in a process of its own, interleaved, and the ratio. SOURCE is anything that
`model.source` takes; examples/spark-tiny unless given.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPEATS, WINDOWS, LENGTH = 3, 16, 512
ROOT = Path(__file__).parents[2]


def measure(way: str, source: str) -> None:
    """Scores random tokens one way and prints seconds and peak memory in MB."""
    import torch

    from models.skeleton import load_model, model_config
    from models.source import open_source
    from validate.score import final_hidden

    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = open_source(source, base=Path.cwd(), side_folder=Path(scratch))
        vocabulary = model_config(checkpoint).vocab_size
        ids = torch.randint(0, vocabulary, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(0))
        began = time.perf_counter()
        if way == "streamed":
            final_hidden(checkpoint, ids, torch.bfloat16)
        else:
            model = load_model(checkpoint, torch.bfloat16)
            with torch.no_grad():
                for batch in ids.split(8):
                    model.base_model(batch, use_cache=False)
        seconds = time.perf_counter() - began
    print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)


def main(source: str) -> None:
    results: dict[str, list[tuple[float, float]]] = {"whole": [], "streamed": []}
    for _ in range(REPEATS):
        for way, found in results.items():
            command = [sys.executable, __file__, way, source]
            output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment())
            seconds, memory = map(float, output.stdout.split())
            found.append((seconds, memory))
    print(f"{source}: {WINDOWS} windows of {LENGTH} tokens, median of {REPEATS} interleaved runs")
    medians = {way: [statistics.median(column) for column in zip(*rows, strict=True)] for way, rows in results.items()}
    for way, (seconds, memory) in medians.items():
        ratio = seconds / medians["whole"][0]
        print(f"{way:9} {seconds:7.2f} s ({ratio:.2f} of whole)  peak {memory:6.0f} MB")


def environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT)}


if __name__ == "__main__":
    if len(sys.argv) == 3:
        measure(*sys.argv[1:])
    else:
        main(sys.argv[1] if len(sys.argv) == 2 else "examples/spark-tiny")
