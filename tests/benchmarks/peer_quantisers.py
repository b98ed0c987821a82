"""What other converters make of a checkpoint, each in its usual settings; runs in an interpreter that has them.

    PYTHON peer_quantisers.py list
    PYTHON peer_quantisers.py quantise PEER SOURCE WINDOWS GROUP_SIZE OUTPUT

SOURCE is a Hugging Face folder, WINDOWS a safetensors file with ``ids`` int64 [windows, tokens]. OUTPUT becomes a
checkpoint: with packed weights in the GPTQ layout where the peer writes that, else with the rounded weights as floats.
Peers compute in bf16 where the processor has products of it, else in fp32: torch's own loops for bf16 are several
times slower than that. Imports nothing of the project: `tests/benchmarks/fidelity_peers.py` starts it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Peer:
    """A converter.

    Attributes:
        distribution: its package.
        kind: of grid, as in `tests/benchmarks/fidelity.py`.
        group_bits: what its file holds for each group beside the codes.
        quantise: (source, ids, group size, output).
    """

    distribution: str
    kind: str
    group_bits: int
    quantise: Callable[[Path, torch.Tensor, int, Path], None]


def dtype() -> torch.dtype:
    """What the peers compute in."""
    return torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def gptqmodel(source: Path, ids: torch.Tensor, group_size: int, output: Path) -> None:
    # Its pool of threads refuses to start on fewer than three processors.
    processors = max(3, os.cpu_count() or 1)
    os.cpu_count = lambda: processors
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    settings = QuantizeConfig(bits=4, group_size=group_size, sym=True)
    model = GPTQModel.load(str(source), settings, device="cpu", dtype=dtype())
    samples = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in ids]
    model.quantize(samples, batch_size=8, backend=BACKEND.GPTQ_TORCH)
    model.save(str(output))


def llm_compressor(source: Path, ids: torch.Tensor, group_size: int, output: Path) -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype())
    weights = QuantizationArgs(num_bits=4, strategy="group", group_size=group_size, symmetric=True, actorder="static")
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    data = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()})
    oneshot(
        model=model,
        dataset=data,
        recipe=GPTQModifier(config_groups={"all": scheme}, ignore=["lm_head"]),
        max_seq_length=ids.shape[1],
        num_calibration_samples=len(ids),
    )
    _save(model.state_dict(), source, output)


def auto_round(source: Path, ids: torch.Tensor, group_size: int, output: Path) -> None:
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype())
    batches = torch.utils.data.DataLoader([{"input_ids": row} for row in ids], batch_size=8)
    rounder = AutoRound(
        model,
        AutoTokenizer.from_pretrained(source),
        scheme="W4A16",
        group_size=group_size,
        sym=True,
        iters=30,
        nsamples=len(ids),
        seqlen=ids.shape[1],
        batch_size=8,
        dataset=batches,
        amp=dtype() != torch.float32,
        device_map="cpu",
        enable_torch_compile=False,
    )
    rounder.quantize_and_save(str(output), format="auto_gptq")
    # It makes a folder of its own in there.
    (made,) = output.iterdir()
    for file in made.iterdir():
        file.rename(output / file.name)
    made.rmdir()


def hqq(source: Path, ids: torch.Tensor, group_size: int, output: Path) -> None:
    from torchao.quantization.quant_primitives import _choose_qparams_and_quantize_affine_hqq
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype())
    plain = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            codes, scales, zeros, _ = _choose_qparams_and_quantize_affine_hqq(
                module.weight.data, 4, group_size, compute_dtype=torch.bfloat16, device="cpu", raw_output=True
            )
            groups = codes.float().view(-1, group_size)
            values = (groups - zeros.float().view(-1, 1)) * scales.float().view(-1, 1)
            plain[f"{name}.weight"] = values.view(module.weight.shape)
    _save(plain, source, output)


def _save(tensors: Mapping[str, torch.Tensor], source: Path, output: Path) -> None:
    """Writes those tensors that the source has, biases too, without what a peer keeps beside them."""
    names = {name for file in source.glob("*.safetensors") for name in load_file(file)}
    output.mkdir(parents=True)
    save_file({name: tensors[name].contiguous() for name in sorted(names)}, output / "model.safetensors")
    (output / "config.json").write_text("{}")


PEERS = {
    "GPTQModel": Peer("gptqmodel", "symmetric", 20, gptqmodel),
    "llm-compressor": Peer("llmcompressor", "symmetric", 16, llm_compressor),
    "AutoRound": Peer("auto-round", "symmetric", 20, auto_round),
    "HQQ": Peer("torchao", "float", 32, hqq),
}


def installed() -> dict[str, dict[str, object]]:
    """The peers that this interpreter has, with version, kind of grid and bits of a group."""
    found: dict[str, dict[str, object]] = {}
    for name, peer in PEERS.items():
        try:
            version = importlib.metadata.version(peer.distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[name] = {"version": version, "kind": peer.kind, "group_bits": peer.group_bits}
    return found


def main(arguments: list[str]) -> None:
    if arguments == ["list"]:
        print(json.dumps(installed()))
        return
    _, name, source, windows, group_size, output = arguments
    PEERS[name].quantise(Path(source), load_file(windows)["ids"], int(group_size), Path(output))


if __name__ == "__main__":
    main(sys.argv[1:])
