"""Phone artifacts compiled by Qualcomm's HTP compiler and run in its simulator; onnxruntime-qnn brings both for x86."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import onnxruntime
import onnxruntime_qnn
from onnxruntime_session import HostSession
from phone_host import Host, cpu_session

# Hexagon of the Snapdragon 8 Gen 3.
ARCHITECTURE = "75"
LIBRARY = "QNN"


def open_session(job: dict[str, Any]) -> HostSession:
    """Compiles both graphs of every part, with no operator left to the CPU, which may run an embedding alone.

    Raises:
        ValueError: naming the operators that HTP does not run, or what the compiler said.
    """
    folder = Path(job["artifact"])
    kernels: dict[str, str] = {}
    tables = _tables(folder)

    def opened(path: Path) -> onnxruntime.InferenceSession:
        try:
            session = compiled(path)
        except Exception as error:
            if path.name in tables:
                kernels[path.stem] = "CPU: the embedding table"
                return cpu_session(path)
            raise ValueError(f"{path.name}: {_why(path, error)}") from error
        count = sum(len(subgraph.get_nodes()) for subgraph in session.get_provider_graph_assignment_info())
        kernels[path.stem] = f"HTP v{ARCHITECTURE}, all {count} operators"
        return session

    return HostSession(Host(folder, opened), kernels, job["steps"])


def compiled(path: Path) -> onnxruntime.InferenceSession:
    """A graph on HTP, no operator left to the CPU. Raises onnxruntime's error when that is not possible."""
    if not _devices():
        onnxruntime.register_execution_provider_library(LIBRARY, onnxruntime_qnn.get_library_path())
    return onnxruntime.InferenceSession(path, _options(strict=True))


def _tables(folder: Path) -> set[str]:
    """Graphs that hold an embedding and nothing else."""
    parts = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["parts"]
    alone = [part for part in parts if part["layers"] == [0, 0]]
    return {part[kind]["file"] for part in alone for kind in ("prefill", "decode")}


def version() -> str:
    """Of onnxruntime-qnn."""
    return str(onnxruntime_qnn.__version__)


def _devices() -> list[Any]:
    return [device for device in onnxruntime.get_ep_devices() if device.ep_name == LIBRARY]


def _options(strict: bool) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    # The quantisers at a graph's ports would else be the CPU's.
    htp = {
        "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
        "htp_arch": ARCHITECTURE,
        "offload_graph_io_quantization": "0",
    }
    options.add_provider_for_devices(_devices(), htp)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    if strict:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.log_severity_level = 3
    return options


def _why(path: Path, error: Exception) -> str:
    """The operators that would run on the CPU; where even that does not compile, the compiler's own words."""
    said = " ".join(str(error).split())
    try:
        session = onnxruntime.InferenceSession(path, _options(strict=False))
    except Exception:
        return said
    left = Counter(
        node.op_type
        for subgraph in session.get_provider_graph_assignment_info()
        if subgraph.ep_name != LIBRARY
        for node in subgraph.get_nodes()
    )
    named = ", ".join(f"{count} x {operator}" for operator, count in sorted(left.items()))
    return f"HTP does not run {named}" if named else said
