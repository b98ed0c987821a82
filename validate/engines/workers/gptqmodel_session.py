"""Artifacts in GPTQModel, on its kernels that pack the weights into torch's int4 operator while they load."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch
from gptqmodel import BACKEND, GPTQModel
from torch_session import TorchSession


def open_session(job: dict[str, Any]) -> TorchSession:
    """Loads the job's artifact.

    Left to itself GPTQModel compiles other kernels for minutes, on each machine once.
    """
    method = json.loads((Path(job["artifact"]) / "config.json").read_text())["quantization_config"]["quant_method"]
    backend = BACKEND.AWQ_TORCH_ATEN if method == "awq" else BACKEND.GPTQ_TORCH_ATEN
    loaded = GPTQModel.load(job["artifact"], device="cpu", dtype=getattr(torch, job["dtype"]), backend=backend)
    return TorchSession(loaded.model)


def version() -> str:
    """GPTQModel's."""
    return importlib.metadata.version("gptqmodel")
