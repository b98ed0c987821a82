"""The scorer beside others' code: transformers' own loss on a run's windows, and lm-evaluation-harness on a text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from calibrate.text import digest_of, tokenise
from models.checkpoint import Folder
from models.tokenizer import load_tokenizer
from models.wide import widen
from tests.helpers import BOS, TEXT, tiny_checkpoint
from tests.runs import LENGTH, PROMPTS, TARGETS, WINDOWS, invoke, project, settings, write_yaml
from validate.score import compare, final_hidden

TARGET = TARGETS[1] | {"method": "rtn"}
# A pipeline's texts.
SEEN = ("text.txt", "calibration.txt")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished run on a hybrid model, and its report."""
    folder = tmp_path_factory.mktemp("judges") / "p"
    validation = settings()["validation"] | {"long_context": 2}
    yaml = project(folder, "spark2_5", config={"num_hidden_layers": 4}, targets=[TARGET], validation=validation)
    assert invoke("run", yaml).exit_code == 0
    assert invoke("expand", folder / "output" / "awq", folder / "expanded").exit_code == 0
    return folder, json.loads((folder / "output" / "report.json").read_text())


def windows(folder: Path) -> torch.Tensor:
    """The windows that README describes, cut here with nothing of ours."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    text = (folder / "text.txt").read_text(encoding="utf-8").removesuffix("\n")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    total = len(ids) // LENGTH
    return torch.tensor([ids[(i * total // WINDOWS) * LENGTH :][:LENGTH] for i in range(WINDOWS)])


@torch.no_grad()
def losses(path: Path, ids: torch.Tensor) -> list[float]:
    """transformers' own mean loss of each window."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    # On processors that multiply no bf16, by the same products: a window's loss differs by 0.3 % otherwise.
    widen(model, torch.bfloat16)
    return [float(model(input_ids=row[None], labels=row[None]).loss) for row in ids]


def begins_texts(model: Path) -> None:
    """Makes a model's tokenizer put its <s> before every text, as Llama's do."""
    file = model / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    tokenizer.save(str(file))
    assert AutoTokenizer.from_pretrained(model)("a")["input_ids"][0] == BOS


def begun(ids: list[int], indices: Sequence[int]) -> torch.Tensor:
    """Windows that hold <s> and the text's next tokens: number ``indices`` of all of them, one behind the other."""
    size = LENGTH - 1
    return torch.tensor([[BOS, *ids[index * size :][:size]] for index in indices])


def test_a_tokenizers_first_token_begins_every_window_of_calibration_and_evaluation_and_is_reported(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "p"
    # The calibration text is another one, and GPTQ looks at it.
    values = settings(targets=[TARGETS[1] | {"method": "gptq"}])
    values["calibration"]["dataset"] = {"path": "text", "data_files": "calibration.txt"}
    yaml = project(folder, "qwen2", **values)
    (folder / "calibration.txt").write_bytes(TEXT.read_bytes()[100_000:106_000])
    begins_texts(folder / "model")
    assert invoke("run", yaml).exit_code == 0
    report = json.loads((folder / "output" / "report.json").read_text())
    ledger = json.loads((folder / "output" / "awq" / "conversion.json").read_text())
    policy = "<s> before every window; the text itself is tokenised whole without special tokens"
    assert report["reference"]["bos"] == ledger["calibration"]["bos"] == policy
    assert policy in (folder / "output" / "report.html").read_text().replace("&lt;", "<").replace("&gt;", ">")

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    texts = {name: (folder / name).read_text(encoding="utf-8").removesuffix("\n") for name in SEEN}
    ids = {name: tokenizer(text, add_special_tokens=False)["input_ids"] for name, text in texts.items()}
    totals = {name: len(found) // (LENGTH - 1) for name, found in ids.items()}
    # The windows that were scored, by their hash and by transformers' own loss on them.
    judged = begun(ids["text.txt"], [i * totals["text.txt"] // WINDOWS for i in range(WINDOWS)])
    assert report["reference"]["windows_sha256"] == digest_of(judged)
    found = losses(folder / "model", judged)
    assert report["reference"]["perplexity"] == pytest.approx(math.exp(sum(found) / WINDOWS), rel=2e-3)
    assert report["reference"]["tokens"] == WINDOWS * (LENGTH - 1)
    # Those that calibration drew, among all of that kind.
    samples, every = values["calibration"]["samples"], begun(ids["calibration.txt"], range(totals["calibration.txt"]))
    drawn = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))[:samples].sort().values
    assert ledger["calibration"]["windows_sha256"] == digest_of(every[drawn])


@pytest.mark.parametrize("which", ["reference", "artifact"])
def test_a_runs_perplexity_is_transformers_own_on_the_same_windows(
    done: tuple[Path, dict[str, Any]], which: str
) -> None:
    folder, report = done
    found = losses(folder / ("model" if which == "reference" else "expanded"), windows(folder))
    entry = report["reference"] if which == "reference" else report["targets"][0]
    assert entry["perplexity"] == pytest.approx(math.exp(sum(found) / WINDOWS), rel=2e-3)
    if which == "artifact":
        assert report["nll"]["awq"] == pytest.approx(found, rel=2e-3)


def test_every_token_but_a_windows_first_is_counted_once_and_none_is_padding(
    done: tuple[Path, dict[str, Any]],
) -> None:
    folder, report = done
    ids = windows(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    assert tokenizer.pad_token_id is not None and not ids.eq(tokenizer.pad_token_id).any()
    assert report["reference"]["tokens"] == report["targets"][0]["tokens"] == ids.numel() - len(ids)
    assert report["reference"]["bos"].startswith("none: ")
    texts = report["continuations"]
    assert len(texts["prompts"]) == PROMPTS and all(len(row) == 6 for row in texts["reference"])
    assert not any(tokenizer.pad_token in piece for row in texts["reference"] for piece in row)


def test_a_hybrid_models_long_context_is_reported_when_it_is_asked_for(done: tuple[Path, dict[str, Any]]) -> None:
    folder, report = done
    found = report["targets"][0]["long_context"]
    assert (found["sliding_window"], found["length"], found["windows"]) == (16, 64, 2)
    assert len(found["quarters"]) == 4 and all(0.2 < ratio < 5 for ratio in found["quarters"])
    assert found["needle"]["distance"] > 32 and found["needle"]["gain"] != found["needle"]["reference_gain"]
    assert "in contexts of 64 tokens, sliding window 16" in (folder / "output" / "report.html").read_text()
    text = invoke("validate", folder / "pipeline.yaml").output
    assert "awq: 64 tokens beyond a sliding window of 16: ratio by quarter " in text


def test_a_long_context_of_a_model_without_a_window_is_refused(tmp_path: Path) -> None:
    yaml = project(tmp_path / "p", "llama", targets=[TARGET])
    write_yaml(yaml.parent, settings(targets=[TARGET], validation=settings()["validation"] | {"long_context": 2}))
    result = invoke("run", yaml)
    assert (
        result.exit_code == 2 and "long_context: this model has no sliding window; leave the key out" in result.output
    )


ROLLING = 24


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Folder, str, torch.Tensor]:
    """A tiny model, and a text that fills lm-evaluation-harness's windows, with its tokens."""
    source = Folder(tiny_checkpoint(tmp_path_factory.mktemp("rolling") / "model", "spark2_5"))
    tokenizer = load_tokenizer(source)
    whole = tokenise(tokenizer, TEXT.read_text(encoding="utf-8")[:4000])
    for count in range(12, 1, -1):
        text = tokenizer.decode(whole[: count * ROLLING])
        ids = tokenise(tokenizer, text)
        if len(ids) == count * ROLLING:
            return source, text, ids
    raise AssertionError("no text of whole windows")


def test_word_and_byte_perplexity_are_those_of_lm_evaluation_harness(
    source: tuple[Folder, str, torch.Tensor], tmp_path: Path
) -> None:
    """Its windows begin with the token before them, so that every token of the text is predicted once; cut so, our
    scorer's sum of losses gives its figures."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

    checkpoint, text, ids = source
    (tmp_path / "text.jsonl").write_text(json.dumps({"page": text}) + "\n")
    task = ConfigurableTask(
        config={
            "task": "book",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(tmp_path / "text.jsonl")}},
            "test_split": "test",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{page}}",
            "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
            "metadata": {"version": 1},
        }
    )
    judge = HFLM(
        pretrained=AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(checkpoint.path),
        max_length=ROLLING,
        batch_size=1,
        device="cpu",
    )
    assert judge.prefix_token_id == BOS
    results = simple_evaluate(model=judge, tasks=[task], bootstrap_iters=0, verbosity="ERROR")
    theirs = {name.partition(",")[0]: value for name, value in results["results"]["book"].items()}

    before = torch.cat([torch.tensor([BOS]), ids[ROLLING - 1 : -1 : ROLLING]])
    cut = torch.cat([before[:, None], ids.view(-1, ROLLING)], dim=1)
    hidden = final_hidden(checkpoint, cut, torch.float32)
    scores = compare(checkpoint, hidden, checkpoint, hidden, cut, torch.float32)
    total = sum(scores.nll) * ROLLING
    assert scores.tokens == len(ids)
    assert theirs["word_perplexity"] == pytest.approx(math.exp(total / len(re.split(r"\s+", text))), rel=1e-3)
    assert theirs["byte_perplexity"] == pytest.approx(math.exp(total / len(text.encode())), rel=1e-4)
