"""What validation costs, in CPU seconds and in forward passes: python tests/benchmarks/validation.py [SOURCE [WINDOWS]]

The unit is one pass of the whole transformers model in bf16 over the same tokens, logits and loss included. Everything
else is `validate.measure` itself with the settings that a pipeline.yaml has unless it says more: expanded weights, the
engine's arithmetic on the tokens that `engine_tokens` is then, and greedy continuations, each part by the name that the
progress bar gives it. It is measured in this process after a first pass over one window, so that nothing is imported or
compiled in it. The artifacts are rounded to nearest; that changes nothing of the cost. SOURCE is anything that
`model.source` takes; WINDOWS of 512 tokens of examples/text/evaluation.txt are scored.

Scoring goes with the tokens, greedy continuations do not: each sum stands as it was measured, and for as many tokens as
are scored unless a pipeline.yaml says more. Exit code 1: the latter is above its bound.
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
from convert.prepare import read_text, to_spec, validation_settings
from convert.sections import Dataset, Validation
from convert.target import Target
from export.artifact import Artifact, write
from export.ledger import Ledger
from export.plan import make_plan
from models.opened import OpenedModel, open_model
from models.skeleton import load_model
from models.source import open_source
from models.tokenizer import load_tokenizer
from validate.measure import Reference, Settings, measure, measure_reference

ROOT = Path(__file__).parents[2]
LENGTH, DTYPE = 512, torch.bfloat16
FORMATS = ("gptq", "awq", "tinygemm")
# Of an artifact and of the reference, in forward passes over the tokens.
BOUND, REFERENCE_BOUND = 2.0, 1.0
# Parts that do not go with the number of tokens.
ONCE = ("other", "greedy")


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


class Parts:
    """CPU seconds of this process, all threads, by the part that was announced last."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.part, self.began = "other", time.process_time()

    def __call__(self, what: str, done: int, total: int) -> None:
        """A progress callback."""
        if what != self.part:
            self.stop()
            self.part = what

    def stop(self) -> None:
        """Counts what has passed until now."""
        now = time.process_time()
        self.seconds[self.part] = self.seconds.get(self.part, 0.0) + now - self.began
        self.began = now


def parts_of(work: Callable[[Parts], object]) -> dict[str, float]:
    """CPU seconds of each part of some work."""
    parts = Parts()
    work(parts)
    parts.stop()
    return parts.seconds


def settings_of(model: OpenedModel, count: int, scratch: Path) -> Settings:
    """A pipeline's, where it names a text and how many tokens to score."""
    text = Dataset(path="text", data_files=str(ROOT / "examples" / "text" / "evaluation.txt"))
    config = Validation(dataset=text, sequence_length=LENGTH, tokens=count * LENGTH)
    tokenizer = load_tokenizer(model.checkpoint)
    return validation_settings(config, read_text(text, ROOT, scratch), tokenizer, model, DTYPE)


def main(source: str, count: int) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = open_model(open_source(source, base=ROOT, side_folder=folder / "tokenizer"))
        settings = settings_of(model, count, folder / "text")
        ids = settings.windows.ids
        forward(model, ids[:1])
        unit = sum(parts_of(lambda _: forward(model, ids)).values())
        print(f"{source}: {count} windows of {LENGTH} tokens, {torch.get_num_threads()} threads")
        print(f"the engine's arithmetic on {settings.engine_windows} windows; {len(settings.prompts)} prompts")
        print(f"{'one forward pass':34} {unit:7.1f} s  1.00", flush=True)
        above = False

        usual = Validation.model_fields["tokens"].default / ids.numel()

        def show(what: str, seconds: dict[str, float], bound: float) -> None:
            nonlocal above
            for part, spent in seconds.items():
                print(f"  {part:32} {spent:7.1f} s  {spent / unit:.2f}")
            total = sum(seconds.values())
            once = sum(spent for part, spent in seconds.items() if part.endswith(ONCE))
            at_usual = (total - once) / unit + once / (unit * usual)
            above = above or at_usual > bound
            print(
                f"{what:34} {total:7.1f} s  {total / unit:.2f}; at {usual * ids.numel():.0f} tokens {at_usual:.2f},",
                end=" ",
            )
            print(f"bound {bound:.2f}", flush=True)

        found: list[Reference] = []
        cache = folder / "reference"
        cache.mkdir()
        seconds = parts_of(lambda parts: found.append(measure_reference(model.checkpoint, settings, cache, parts)))
        show("the reference, once", seconds, REFERENCE_BOUND)
        for format in FORMATS:
            artifact = build(model, format, folder)

            def work(parts: Parts, artifact: Artifact = artifact) -> None:
                measure(artifact, model.checkpoint, found[0], settings, parts)

            show(format, parts_of(work), BOUND)
    return int(above)


if __name__ == "__main__":
    source, count = [*sys.argv[1:], *("examples/spark-tiny", "40")[len(sys.argv) - 1 :]][:2]
    sys.exit(main(source, int(count)))
