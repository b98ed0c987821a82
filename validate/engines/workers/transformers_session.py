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
    import models  # noqa: F401


def open_session(job: dict[str, Any]) -> TorchSession:
    """Loads the job's artifact."""
    return TorchSession(
        AutoModelForCausalLM.from_pretrained(job["artifact"], dtype=getattr(torch, job["dtype"]), device_map="cpu")
    )


def version() -> str:
    """Of transformers."""
    return str(transformers.__version__)
