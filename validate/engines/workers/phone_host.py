"""A phone artifact in ONNX Runtime, driven by its manifest alone: chunks through prefill, then steps through decode.

It needs numpy, onnxruntime and ``manifest.json``, and nothing of edge-convert; it is what a phone's own host loop does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

# An input or output as the manifest describes it (`export.phone.manifest.Port`).
Port = Mapping[str, Any]
# (graph file) -> a session; another backend brings its own.
OpenSession = Callable[[Path], onnxruntime.InferenceSession]
# A step of a text: ``prefill`` or ``decode``, how many tokens are no padding, and the states that enter a part.
Step = tuple[str, int, np.ndarray]
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


class Positions:
    """How far a text is, and which of its positions the slots of the caches hold.

    Attributes:
        position: how many tokens were taken.
        held: by layer type, the position whose entry each slot of the caches holds, or EMPTY.
    """

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self._manifest = manifest
        self.position = 0
        self.held = {type: np.full(cache["slots"], EMPTY, dtype=np.int64) for type, cache in manifest["caches"].items()}

    def next(self, size: int) -> np.ndarray:
        """The positions int [size] of the next tokens."""
        return self.position + np.arange(size)

    def inputs(self, size: int) -> dict[str, np.ndarray]:
        """Masks and rotary inputs of the next ``size`` tokens, by role and layer type."""
        positions = self.next(size)
        values: dict[str, np.ndarray] = {}
        for type, cache in self._manifest["caches"].items():
            others = np.concatenate([self.held[type], positions])
            distance = positions[:, None] - others[None]
            seen = (others[None] != EMPTY) & (distance >= 0)
            if cache["window"] is not None:
                seen &= distance < cache["window"]
            values[f"mask {type}"] = np.where(seen, 0, self._manifest["mask_value"]).astype(np.float32)[None, None]
        for type, rotary in self._manifest["rotary"].items():
            frequencies = np.array(rotary["inverse_frequencies"], dtype=np.float32)
            angles = positions[:, None].astype(np.float32) * frequencies[None]
            angles = np.concatenate([angles, angles], axis=-1)[None]
            scaling = np.float32(rotary["scaling"])
            values[f"cos {type}"], values[f"sin {type}"] = np.cos(angles) * scaling, np.sin(angles) * scaling
        return values

    def advance(self, count: int) -> None:
        """The next ``count`` tokens were taken, and their entries kept."""
        for held in self.held.values():
            kept = self.next(count)[-len(held) :]
            held[kept % len(held)] = kept
        self.position += count


@dataclass
class _LayerCache:
    """One layer's past entries, as its graphs take them: keys [1, kv_heads, head_dim, slots], values
    [1, kv_heads, slots, head_dim], in the ports' dtype."""

    key: np.ndarray
    value: np.ndarray


class PartHost:
    """One part of the graphs, with the caches of its layers.

    Args:
        part: its entry in the manifest.
    """

    def __init__(self, folder: Path, part: Mapping[str, Any], open_session: OpenSession = cpu_session) -> None:
        self.part = part
        self._sessions = {kind: open_session(folder / part[kind]["file"]) for kind in ("prefill", "decode")}
        self.reset()

    def reset(self) -> None:
        """Forgets the text."""
        self._caches: dict[int, _LayerCache] = {}
        past: dict[int, dict[str, np.ndarray]] = {}
        for port in self.part["decode"]["inputs"]:
            if port["layer"] is not None:
                zeros = np.full(port["shape"], port["zero_point"] or 0, dtype=port["dtype"])
                past.setdefault(port["layer"], {})[port["role"]] = zeros
        for layer, entries in past.items():
            self._caches[layer] = _LayerCache(entries["past_key"], entries["past_value"])

    def run(self, kind: str, given: Mapping[str, np.ndarray], state: np.ndarray, kept: np.ndarray) -> np.ndarray:
        """What the part makes of a state; keeps the new cache entries.

        Args:
            kind: ``prefill`` or ``decode``.
            given: masks and rotary inputs, see `Positions.inputs`.
            state: token ids int32 [1, tokens], or hidden states fp32 [1, tokens, hidden].
            kept: the positions of the tokens that are no padding; they come first.

        Returns:
            Hidden states or logits, fp32 [1, tokens, size].
        """
        graph = self.part[kind]
        results = self._sessions[kind].run(None, dict(self._feeds(graph["inputs"], given, state)))
        new: dict[int, dict[str, np.ndarray]] = {}
        for port, value in zip(graph["outputs"], results, strict=True):
            if port["layer"] is None:
                state = to_real(port, value)
            else:
                new.setdefault(port["layer"], {})[port["role"]] = value
        for layer, entries in new.items():
            self._keep(layer, entries, kept)
        return state

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


class PartDriver:
    """One part alone, for texts whose states before it are known: parts of any number then run one after another."""

    def __init__(self, folder: Path, index: int, open_session: OpenSession = cpu_session) -> None:
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        self._part = PartHost(folder, self.manifest["parts"][index], open_session)

    def __call__(self, steps: Sequence[Step]) -> list[np.ndarray]:
        """What the part makes of a text's states, step by step from the beginning of the text."""
        self._part.reset()
        positions = Positions(self.manifest)
        results = []
        for kind, count, state in steps:
            given, kept = positions.inputs(state.shape[1]), positions.next(count)
            results.append(self._part.run(kind, given, state, kept))
            positions.advance(count)
        return results


class Host:
    """A text in progress.

    Args:
        folder: of the artifact.
        open_session: how graphs are run.
    """

    def __init__(self, folder: Path, open_session: OpenSession = cpu_session) -> None:
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        self._parts = [PartHost(folder, part, open_session) for part in self.manifest["parts"]]
        self.reset()

    @property
    def position(self) -> int:
        """How many tokens it has taken."""
        return self._positions.position

    @property
    def held(self) -> dict[str, np.ndarray]:
        """By layer type, the position whose entry each slot of the caches holds, or EMPTY."""
        return self._positions.held

    def reset(self) -> None:
        """Forgets the text."""
        self._positions = Positions(self.manifest)
        for part in self._parts:
            part.reset()

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
        size, count = self.manifest["prefill"] if kind == "prefill" else 1, len(tokens)
        if self.position + count > self.manifest["context"]:
            raise ValueError(f"{self.position + count} tokens; the context holds {self.manifest['context']}")
        state = np.zeros((1, size), dtype=np.int32)
        state[0, :count] = tokens
        given, kept = self._positions.inputs(size), self._positions.next(count)
        for part in self._parts:
            state = part.run(kind, given, state, kept)
        self._positions.advance(count)
        return state[0, :count]


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
