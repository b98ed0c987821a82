"""A phone artifact in ONNX Runtime, driven by its manifest alone: chunks through prefill, then steps through decode.

It needs numpy, onnxruntime and ``manifest.json``, and nothing of edge-convert; it is what a phone's own host loop does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

# An input or output as the manifest describes it (`export.phone.manifest.Port`).
Port = Mapping[str, Any]
# (graph file) -> a session; another backend brings its own.
OpenSession = Callable[[Path], onnxruntime.InferenceSession]
# Positions below zero: a slot without an entry.
EMPTY = -1


def cpu_session(path: Path, threads: int = 1) -> onnxruntime.InferenceSession:
    """On the CPU, the graph as it is: ONNX Runtime's optimisations merge dequantisers into other kernels, which
    changes the numbers by more than a quantisation does."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    # Spinning threads take the cores that they wait for.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


@dataclass
class _LayerCache:
    """One layer's past entries, as its graphs take them: keys [1, kv_heads, head_dim, slots], values
    [1, kv_heads, slots, head_dim], in the ports' dtype."""

    key: np.ndarray
    value: np.ndarray


class Host:
    """A text in progress.

    Args:
        folder: of the artifact.
        open_session: how graphs are run.

    Attributes:
        position: how many tokens it has taken.
        held: by layer type, the position whose entry each slot of the caches holds, or EMPTY.
    """

    def __init__(self, folder: Path, open_session: OpenSession = cpu_session) -> None:
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        self._sessions = {
            kind: [open_session(folder / part[kind]["file"]) for part in self.manifest["parts"]]
            for kind in ("prefill", "decode")
        }
        self.reset()

    def reset(self) -> None:
        """Forgets the text."""
        self.position = 0
        caches = self.manifest["caches"]
        self.held = {type: np.full(cache["slots"], EMPTY, dtype=np.int64) for type, cache in caches.items()}
        self._caches: dict[int, _LayerCache] = {}
        for part in self.manifest["parts"]:
            past: dict[int, dict[str, np.ndarray]] = {}
            for port in part["decode"]["inputs"]:
                if port["layer"] is not None:
                    zeros = np.full(port["shape"], port["zero_point"] or 0, dtype=port["dtype"])
                    past.setdefault(port["layer"], {})[port["role"]] = zeros
            for layer, entries in past.items():
                self._caches[layer] = _LayerCache(entries["past_key"], entries["past_value"])

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Takes int [n] more tokens in chunks; returns their logits, fp32 [n, vocabulary].

        Raises:
            ValueError: when the context is too short for them.
        """
        size = self.manifest["prefill"]
        chunks = [self._run("prefill", tokens[start : start + size]) for start in range(0, len(tokens), size)]
        return np.concatenate(chunks)

    def decode(self, token: int) -> np.ndarray:
        """Takes one more token; returns its logits, fp32 [vocabulary]. Raises ValueError as `prefill` does."""
        logits: np.ndarray = self._run("decode", np.array([token]))[0]
        return logits

    def score(self, tokens: np.ndarray, decoded: int) -> np.ndarray:
        """Logits fp32 [n, vocabulary] of a text int [n] from its beginning, the last ``decoded`` tokens in steps."""
        self.reset()
        first = len(tokens) - decoded
        logits = [self.prefill(tokens[:first])] if first else []
        return np.concatenate([*logits, *(self.decode(int(token))[None] for token in tokens[first:])])

    def continue_greedily(self, prompt: np.ndarray, count: int) -> list[int]:
        """The likeliest next tokens, one after another."""
        self.reset()
        found = [int(self.prefill(prompt)[-1].argmax())]
        while len(found) < count:
            found.append(int(self.decode(found[-1]).argmax()))
        return found

    def _run(self, kind: str, tokens: np.ndarray) -> np.ndarray:
        """Logits [n, vocabulary] of at most as many tokens as the graph takes; keeps the new cache entries."""
        manifest = self.manifest
        size, count = manifest["prefill"] if kind == "prefill" else 1, len(tokens)
        if self.position + count > manifest["context"]:
            raise ValueError(f"{self.position + count} tokens; the context holds {manifest['context']}")
        ids = np.zeros((1, size), dtype=np.int32)
        ids[0, :count] = tokens
        positions = self.position + np.arange(size)
        given = self._by_type(positions)
        state: np.ndarray = ids
        new: dict[int, dict[str, np.ndarray]] = {}
        for part, session in zip(manifest["parts"], self._sessions[kind], strict=True):
            graph = part[kind]
            results = session.run(None, dict(self._feeds(graph["inputs"], given, state)))
            for port, value in zip(graph["outputs"], results, strict=True):
                if port["layer"] is None:
                    state = to_real(port, value)
                else:
                    new.setdefault(port["layer"], {})[port["role"]] = value
        for layer, entries in new.items():
            self._keep(layer, entries, positions[:count])
        for held in self.held.values():
            kept = positions[:count][-len(held) :]
            held[kept % len(held)] = kept
        self.position += count
        return state[0, :count]

    def _by_type(self, positions: np.ndarray) -> dict[str, np.ndarray]:
        """Masks and rotary inputs by role and layer type."""
        values: dict[str, np.ndarray] = {}
        for type, cache in self.manifest["caches"].items():
            others = np.concatenate([self.held[type], positions])
            distance = positions[:, None] - others[None]
            seen = (others[None] != EMPTY) & (distance >= 0)
            if cache["window"] is not None:
                seen &= distance < cache["window"]
            values[f"mask {type}"] = np.where(seen, 0, self.manifest["mask_value"]).astype(np.float32)[None, None]
        for type, rotary in self.manifest["rotary"].items():
            frequencies = np.array(rotary["inverse_frequencies"], dtype=np.float32)
            angles = positions[:, None].astype(np.float32) * frequencies[None]
            angles = np.concatenate([angles, angles], axis=-1)[None]
            scaling = np.float32(rotary["scaling"])
            values[f"cos {type}"], values[f"sin {type}"] = np.cos(angles) * scaling, np.sin(angles) * scaling
        return values

    def _feeds(
        self, ports: list[Port], given: Mapping[str, np.ndarray], state: np.ndarray
    ) -> Iterator[tuple[str, np.ndarray]]:
        for port in ports:
            role = port["role"]
            if role == "past_key":
                value = self._caches[port["layer"]].key
            elif role == "past_value":
                value = self._caches[port["layer"]].value
            elif role == "input_ids":
                value = state
            else:
                value = from_real(port, state if role == "hidden" else given[f"{role} {port['layer_type']}"])
            yield port["name"], value

    def _keep(self, layer: int, entries: Mapping[str, np.ndarray], positions: np.ndarray) -> None:
        """Puts the new entries of real tokens in their slots; of more than a ring holds, the last."""
        cache = self._caches[layer]
        slots = cache.value.shape[2]
        last = np.arange(len(positions))[-slots:]
        where = positions[last] % slots
        cache.key[..., where] = entries["new_key"][..., last]
        cache.value[:, :, where] = entries["new_value"][:, :, last]


def from_real(port: Port, value: np.ndarray) -> np.ndarray:
    """Real numbers as a port takes them."""
    if port["scale"] is None:
        return value.astype(port["dtype"])
    limits = np.iinfo(port["dtype"])
    codes = np.rint(value / np.float32(port["scale"])) + port["zero_point"]
    return np.clip(codes, limits.min, limits.max).astype(port["dtype"])


def to_real(port: Port, value: np.ndarray) -> np.ndarray:
    """A port's numbers as real ones, fp32."""
    if port["scale"] is None:
        return value.astype(np.float32)
    return (value.astype(np.float32) - port["zero_point"]) * np.float32(port["scale"])
