"""Artifacts in transformers: gptq and awq through GPTQModel's kernels, tinygemm through edge-convert's loader."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import transformers
from torch_session import TorchSession
from transformers import AutoModelForCausalLM

# Registers the loader of tinygemm and the model classes that transformers lacks, where edge-convert is installed.
with contextlib.suppress(ModuleNotFoundError):
    import export.serving  # noqa: F401


def open_session(job: dict[str, Any]) -> TorchSession:
    """Loads the job's artifact.

    Raises:
        ValueError: where transformers itself only warns and goes on with random weights, as it does for a
            quantisation method that it does not know.
    """
    dtype = getattr(torch, job["dtype"])
    model, info = AutoModelForCausalLM.from_pretrained(
        job["artifact"], dtype=dtype, device_map="cpu", output_loading_info=True
    )
    odd = [f"{len(info[kind])} {kind.replace('_', ' ')}" for kind in info if info[kind]]
    if odd:
        raise ValueError(f"not every tensor found its place: {', '.join(odd)}; does this environment lack a loader?")
    return TorchSession(model)


def version() -> str:
    """Of transformers."""
    return str(transformers.__version__)
