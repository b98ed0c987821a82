"""Tiny models and texts that the tests share: real Hugging Face folders, written in a fraction of a second."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

import models.spark2_5  # noqa: F401 - registers the family with transformers
from models.checkpoint import Checkpoint, View

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "examples" / "text" / "evaluation.txt"
VOCABULARY = 512
BOS, EOS, PAD = 0, 1, 2
# Shorter than the texts of the tests, so that masks of sliding layers differ from those of full ones.
WINDOW = 16

# What each family needs beside the sizes that all share.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "qwen2": {"num_hidden_layers": 2, "tie_word_embeddings": False},
    "qwen3": {"num_hidden_layers": 2, "tie_word_embeddings": True, "head_dim": 32},
    "mistral": {"num_hidden_layers": 2, "tie_word_embeddings": False, "head_dim": 32, "sliding_window": WINDOW},
    "phi3": {"num_hidden_layers": 2, "tie_word_embeddings": False, "sliding_window": WINDOW},
    "spark2_5": {"num_hidden_layers": 4, "tie_word_embeddings": True, "head_dim": 32, "sliding_window": WINDOW},
}
MODEL_TYPES = tuple(CONFIGS)


def tiny_checkpoint(
    folder: Path, model_type: str = "llama", *, seed: int = 0, max_shard_size: str = "1GB", **config: Any
) -> Path:
    """Writes a random bf16 model with its tokenizer into ``folder`` and returns it.

    The weights are large enough that layers matter and distributions are peaked: a greedy continuation wanders, and a
    changed weight shows in the logits.

    Args:
        model_type: one of MODEL_TYPES.
        max_shard_size: as for ``save_pretrained``; a small one gives shards and an index.
        config: overrides of the configuration (``num_hidden_layers=3``, ``tie_word_embeddings=False`` ...).
    """
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        **CONFIGS[model_type],
        **config,
    }
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**values), dtype=torch.bfloat16)
    fill(model, seed)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    for name, content in tokenizer_files().items():
        (folder / name).write_bytes(content)
    return folder


@torch.no_grad()
def fill(model: torch.nn.Module, seed: int = 0) -> None:
    """Random parameters: norms near one, biases that matter, matrices that keep the size of what they multiply."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed" in name or "lm_head" in name:
            noise *= 0.3
        elif parameter.dim() == 2:
            # What a layer adds outweighs the embedding, or a tied head would repeat its input.
            gain = 3.0 if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else 1.4
            noise *= gain * parameter.shape[1] ** -0.5
        elif name.endswith("bias"):
            noise *= 0.2
        else:
            noise = 1 + 0.2 * noise
        parameter.copy_(noise)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of VOCABULARY tokens, trained on the first lines of the example text."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tokenizer_json()),
        bos_token="<s>",
        eos_token="<|endoftext|>",
        pad_token="<pad>",
    )


@cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "<|endoftext|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.read_text(encoding="utf-8").splitlines()[:40], trainer)
    return tokenizer.to_str()


@cache
def tokenizer_files() -> dict[str, bytes]:
    """What ``save_pretrained`` writes for the tiny tokenizer, by file name."""
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer().save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    """Random token ids without special ones."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


class Changed(View):
    """A checkpoint with other values in some tensors."""

    def __init__(self, base: Checkpoint, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(base)
        self.change = change

    def read(self, name: str) -> torch.Tensor:
        return self.change(name, self.base.read(name))


class NoFiles(Checkpoint):
    """A checkpoint of which there are no files; a subclass says what it holds."""

    def side_files(self) -> dict[str, Path]:
        return {}

    def skipped_files(self) -> dict[str, str]:
        return {}

    def hashes(self) -> dict[str, str]:
        return {}
