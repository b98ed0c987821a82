"""Phone artifacts in ONNX Runtime on the CPU, driven by their manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from phone_host import Host


class HostSession:
    """See worker.Session."""

    def __init__(self, host: Host, kernels: Mapping[str, str], steps: int) -> None:
        self.host, self.steps = host, steps
        self._kernels = dict(kernels)
        self._logits = torch.empty(0)

    def logits(self) -> torch.Tensor:
        return self._logits

    def score(self, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        self._logits = torch.from_numpy(self.host.score(window.numpy(), min(self.steps, len(window) - 1)))
        logprobs = torch.log_softmax(self._logits[:-1], -1)
        best = logprobs.max(-1)
        return logprobs.gather(1, window[1:, None])[:, 0], best.indices, best.values

    def continue_greedily(self, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
        return torch.tensor([self.host.continue_greedily(prompt.numpy(), tokens) for prompt in prompts])

    def kernels(self) -> dict[str, str]:
        return self._kernels

    def close(self) -> None:
        del self.host


def open_session(job: dict[str, Any]) -> HostSession:
    """Loads the job's artifact; ONNX Runtime's optimisations stay off."""
    return HostSession(Host(Path(job["artifact"])), {}, job["steps"])


def version() -> str:
    """Of ONNX Runtime."""
    return str(onnxruntime.__version__)
