"""Runs artifacts in an engine: ``python worker.py ENGINE JOBS.json RESULTS/``, in the engine's own interpreter.

The engine's environment need not hold edge-convert, so this file and the sessions beside it import only the standard
library, torch, safetensors and the engine. Imports of an engine cost more than small artifacts do, so one process
takes several jobs. Each ends as ``RESULTS/<index>.json``, with ``error`` when the engine refused the artifact, and
``<index>.safetensors``; a job without a file is one during which the process died.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

# Of an engine's message: some print a whole configuration.
LONGEST = 500


class Session(Protocol):
    """One artifact, loaded by an engine."""

    def score(self, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the tokens int64 [tokens] from the second on: fp32 log-probabilities, and the likeliest ids and theirs."""

    def logits(self) -> torch.Tensor:
        """fp32 [tokens, vocabulary] of the tokens scored last; only of engines whose job may ask to keep them."""

    def continue_greedily(self, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
        """int64 [prompts, tokens]: greedy continuations of int64 [prompts, length]; end of text is not special."""

    def kernels(self) -> dict[str, str]:
        """What computes, by the last part of the quantised modules' names; empty when the engine does not tell."""

    def close(self) -> None:
        """Frees the artifact."""


def run_job(module: Any, job: dict[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Loads one artifact, scores the windows, continues the prompts, frees it."""
    session: Session = module.open_session(job)
    try:
        scored, logits = [], []
        for window in job["windows"]:
            scored.append(session.score(torch.tensor(window)))
            if job["keep_logits"]:
                logits.append(session.logits())
        tensors = {
            name: torch.stack(rows).contiguous()
            for name, rows in zip(("logprobs", "top1", "top1_logprobs"), zip(*scored, strict=True), strict=True)
        }
        if logits:
            tensors["logits"] = torch.stack(logits)
        if job["greedy_tokens"]:
            tensors["greedy"] = session.continue_greedily(torch.tensor(job["prompts"]), job["greedy_tokens"])
        return {"version": module.version(), "kernels": session.kernels()}, tensors
    finally:
        session.close()


def main(engine: str, jobs: Path, results: Path) -> None:
    """Runs every job; one that fails does not keep the others from running."""
    module = importlib.import_module(f"{engine}_session")
    for index, job in enumerate(json.loads(jobs.read_text(encoding="utf-8"))):
        try:
            summary, tensors = run_job(module, job)
            save_file(tensors, results / f"{index}.safetensors")
        except Exception as error:
            traceback.print_exc()
            summary = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST]}"}
        (results / f"{index}.json").write_text(json.dumps(summary), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
