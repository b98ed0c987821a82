"""What validation costs, in CPU seconds and in forward passes: python tests/benchmarks/validation.py [SOURCE [WINDOWS]]

The unit is one pass of the whole transformers model in bf16 over the same tokens, logits and loss included. Each part
is measured in this process after a first pass over one window, so that nothing is imported or compiled in it. The
artifacts are rounded to nearest; that changes nothing of the cost. SOURCE is anything that `model.source` takes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from calibrate.quantize import quantize
from calibrate.results import Results
from convert.prepare import to_spec
from convert.target import Target
from export.artifact import Artifact, Expansion, write
from export.ledger import Ledger
from export.plan import make_plan
from models.opened import OpenedModel, open_model
from models.skeleton import load_model
from models.source import open_source
from validate.measure import ENGINES
from validate.score import compare, final_hidden
from validate.swap import kernel_swap

LENGTH, DTYPE = 512, torch.bfloat16
FORMATS = ("gptq", "awq", "tinygemm")


def build(model: OpenedModel, format: str, folder: Path) -> Artifact:
    """An artifact of the model, in groups of 64."""
    target = Target.model_validate({"format": format, "group_size": 64, "method": "rtn"})
    plan = make_plan(to_spec(target), model.checkpoint, model.family, model.linears, DTYPE)
    results = Results(folder / f"results-{format}")
    quantize(model.checkpoint, model.linears, plan.recipe, None, results)
    ledger = Ledger(
        source={"name": "benchmark", "files": {}},
        target={"name": format},
        notes=(),
        tensors=[],
        skipped_files={},
        source_config=model.checkpoint.config,
        dtype="bfloat16",
    )
    write(plan, model.checkpoint, results, model.dimensions.layers, folder / format, ledger, 2**31)
    return Artifact(folder / format)


@torch.no_grad()
def forward(model: OpenedModel, ids: torch.Tensor) -> None:
    """One pass with logits and loss, a window at a time, as a plain perplexity script does it."""
    whole = load_model(model.checkpoint, DTYPE)
    for window in ids.split(1):
        whole(input_ids=window, labels=window, use_cache=False)


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of this process, all threads."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main(source: str, count: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = open_model(open_source(source, base=Path.cwd(), side_folder=folder / "tokenizer"))
        checkpoint = model.checkpoint
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.vocabulary, (count, LENGTH), generator=generator)
        forward(model, ids[:1])
        unit = cpu(lambda: forward(model, ids))
        print(f"{source}: {count} windows of {LENGTH} tokens, {torch.get_num_threads()} threads")
        print(f"{'one forward pass':34} {unit:7.1f} s  1.00")

        def show(what: str, seconds: float) -> None:
            print(f"{what:34} {seconds:7.1f} s  {seconds / unit:.2f}", flush=True)

        reference: list[torch.Tensor] = []
        show("the reference, once", cpu(lambda: reference.append(final_hidden(checkpoint, ids, DTYPE))))
        for format in FORMATS:
            artifact = build(model, format, folder)
            expansion = Expansion(artifact)

            def score(artifact: Artifact = artifact, expansion: Expansion = expansion, kernel: bool = False) -> None:
                options = ()
                if kernel:
                    module = ENGINES[str(artifact.config["quant_method"])][1]
                    options = (kernel_swap(artifact, expansion, module, DTYPE),)
                hidden = final_hidden(expansion, ids, DTYPE, *options)
                compare(checkpoint, reference[0], expansion, hidden, ids, DTYPE, *options)

            show(f"{format}: expanded weights", cpu(score))
            show(f"{format}: the engine's arithmetic", cpu(lambda: score(kernel=True)))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "examples/spark-tiny", int(sys.argv[2]) if len(sys.argv) > 2 else 16)
