"""Artifacts in vLLM's CPU build. Plugins that are installed in its environment are loaded by vLLM itself."""

from __future__ import annotations

import gc
import importlib.metadata
import os
import sys
from typing import Any
from unittest import mock

import torch
import vllm.model_executor.kernels.linear.mixed_precision.cpu as kernel_module
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

KERNEL = kernel_module.CPUWNA16LinearKernel
# vLLM 0.32's kernel for 16-bit activations uses AMX without asking the system for it: an artifact in which no bf16
# matrix product came first, as with a quantised head, would end the process with SIGILL.
torch.cpu._init_amx()


class VllmSession:
    """See worker.Session."""

    def __init__(self, job: dict[str, Any]) -> None:
        longest = max(len(job["windows"][0]), len(job["prompts"][0]) + job["greedy_tokens"]) + 1
        # Read by the kernel while it loads: 4-bit weights with 8-bit activations where the machine has AMX.
        os.environ["VLLM_CPU_INT4_W4A8"] = "0" if job["w4a8"] == "off" else "1"
        self.patches = [*_force_w4a8(job["w4a8"] == "on"), *_emulate_w4a8(job["emulate_w4a8"])]
        for patch in self.patches:
            patch.start()
        try:
            self.llm = LLM(
                job["artifact"],
                dtype=job["dtype"],
                max_model_len=longest,
                # A row of log-probabilities is as wide as the vocabulary: no more of them at a time than needed.
                max_num_batched_tokens=max(longest, 256),
                max_num_seqs=max(1, len(job["prompts"])),
                # The same tokens must be computed each time, not taken from an earlier request.
                enable_prefix_caching=False,
                enforce_eager=True,
                distributed_executor_backend="uni",
                disable_log_stats=True,
                seed=0,
            )
        except BaseException:
            self._end()
            raise

    def score(self, window: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
        tokens = window.tolist()
        (output,) = self.llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
        rows = []
        for token, candidates in zip(tokens[1:], output.prompt_logprobs[1:], strict=True):
            best = next(id for id, candidate in candidates.items() if candidate.rank == 1)
            rows.append((candidates[token].logprob, best, candidates[best].logprob))
        own, ids, logprobs = zip(*rows, strict=True)
        return torch.tensor(own), torch.tensor(ids), torch.tensor(logprobs)

    def continue_greedily(self, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return torch.tensor([list(output.outputs[0].token_ids) for output in outputs])

    def kernels(self) -> dict[str, str]:
        (found,) = self.llm.apply_model(_kernels)
        return dict(found)

    def close(self) -> None:
        self._end()

    def _end(self) -> None:
        llm = self.__dict__.pop("llm", None)
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        for patch in self.patches:
            patch.stop()
        # Also forgets the environment's values, which vLLM keeps from the first engine on.
        cleanup_dist_env_and_memory()
        gc.collect()


def open_session(job: dict[str, Any]) -> VllmSession:
    """Loads the job's artifact."""
    return VllmSession(job)


def version() -> str:
    """vLLM's, whatever name it was installed under."""
    names = importlib.metadata.packages_distributions()["vllm"]
    return importlib.metadata.version(names[0])


def _kernels(model: torch.nn.Module) -> dict[str, str]:
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if not hasattr(module, "weight") and method is not None:
            kernel = type(getattr(method, "kernel", method)).__name__
            path = {True: " W4A8", False: " W4A16", None: ""}[getattr(module, "use_w4a8", None)]
            emulated = " (emulated)" if hasattr(module, "emulation") else ""
            found[name.rpartition(".")[2]] = kernel + path + emulated
    return found


def _force_w4a8(force: bool) -> list[Any]:
    """Lets the kernel alone take this machine for one with AMX: attention would follow a global answer."""
    if not force:
        return []
    original = KERNEL.process_weights_after_loading

    def process(self: Any, layer: torch.nn.Module) -> None:
        with mock.patch.object(torch.cpu, "_is_amx_tile_supported", lambda: True):
            original(self, layer)

    return [mock.patch.object(KERNEL, "process_weights_after_loading", process)]


def _emulate_w4a8(packages: str | None) -> list[Any]:
    """Puts edge-convert's emulation, on the words that vLLM read from the checkpoint, in the place of the kernel.

    Args:
        packages: the folder that holds edge-convert's packages, or None to leave the kernel.
    """
    if packages is None:
        return []
    # Last: what the engine's environment has comes first.
    sys.path.append(packages)
    from calibrate.grid import Quantized
    from validate.kernels import W4A8Linear

    original = KERNEL._process_gptq_weights_w4a8

    def process(self: Any, layer: torch.nn.Module) -> None:
        words, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        codes = _unpack(words.data, dim=0).t().contiguous()
        points = None
        if self.config.zero_points:
            points = _unpack(getattr(layer, self.w_zp_name).data, dim=1).t().contiguous()
        bias: Any = None if layer.bias is None else layer.bias.data
        layer.emulation = W4A8Linear(Quantized(codes, scales.data.t().contiguous(), zero_points=points), bias)
        original(self, layer)

    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        result: torch.Tensor = layer.emulation(x)
        return result

    return [
        mock.patch.object(KERNEL, "_process_gptq_weights_w4a8", process),
        mock.patch.object(KERNEL, "apply_weights", apply),
    ]


def _unpack(words: torch.Tensor, dim: int) -> torch.Tensor:
    """int32 words of eight nibbles along ``dim`` as uint8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    nibbles = (words.unsqueeze(dim + 1) >> (shifts.view(-1, 1) if dim == 0 else shifts)) & 15
    return nibbles.flatten(dim, dim + 1).to(torch.uint8)
