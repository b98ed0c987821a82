"""Mistakes of users: exit code 2, every problem in one message, no traceback, and nothing under a final name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoint import INDEX
from tests.helpers import tiny_checkpoint, tiny_tokenizer
from tests.runs import Zygote, invoke, project, settings, write_yaml

Change = Callable[[Path], None]
DATASET = {"path": "text", "data_files": "text.txt"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that was never run, with its weights in shards."""
    folder = tmp_path_factory.mktemp("plain") / "p"
    project(folder)
    shutil.rmtree(folder / "model")
    tiny_checkpoint(folder / "model", max_shard_size="200KB")
    assert len(shards(folder)) > 2
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted((folder / "model").glob("*.safetensors"))


def holder(folder: Path, name: str) -> Path:
    """The shard that holds a tensor."""
    index = json.loads((folder / "model" / INDEX).read_text())
    return folder / "model" / index["weight_map"][name]


def yaml(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        write_yaml(folder, settings(**changes))

    return change


def raw(text: str) -> Change:
    def change(folder: Path) -> None:
        (folder / "pipeline.yaml").write_text(text)

    return change


def text(content: str) -> Change:
    def change(folder: Path) -> None:
        (folder / "text.txt").write_text(content)

    return change


def config(**values: Any) -> Change:
    def change(folder: Path) -> None:
        file = folder / "model" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return change


def tensor(name: str, change_tensor: Callable[[torch.Tensor], Any]) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(holder(folder, name))
        change_tensor(tensors[name])
        save_file(tensors, holder(folder, name))

    return change


def poke(row: int, column: int, value: float) -> Callable[[torch.Tensor], Any]:
    def change(weight: torch.Tensor) -> None:
        weight[row, column] = value

    return change


def missing_shard(folder: Path) -> None:
    shards(folder)[1].unlink()


def extra_shard(folder: Path) -> None:
    save_file({"x": torch.zeros(1)}, folder / "model" / "model-99999.safetensors")


def truncated_shard(folder: Path) -> None:
    file = shards(folder)[0]
    file.write_bytes(file.read_bytes()[:-10])


def misshapen_tensor(folder: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors = load_file(holder(folder, name))
    tensors[name] = tensors[name][:64].clone()
    save_file(tensors, holder(folder, name))


def pickled(folder: Path) -> None:
    shutil.rmtree(folder / "model")
    tiny_checkpoint(folder / "model")
    (folder / "model" / "model.safetensors").unlink()
    torch.save({"x": torch.zeros(1)}, folder / "model" / "pytorch_model.bin")


def no_tokenizer(folder: Path) -> None:
    for file in (folder / "model").glob("tokenizer*"):
        file.unlink()


def larger_tokenizer(folder: Path) -> None:
    """The model's table is cut to fewer tokens than the tokenizer gives."""
    shutil.rmtree(folder / "model")
    tiny_checkpoint(folder / "model", vocab_size=320)


def output_is_a_file(folder: Path) -> None:
    (folder / "output").write_text("a file")


def work_is_below_a_file(folder: Path) -> None:
    (folder / "file").write_text("a file")
    write_yaml(folder, settings(work="file/work"))


TWICE = [{"name": "a", "format": "gptq"}, {"name": "a", "format": "awq"}]
GREEDY = {"prompts": 3, "prompt_tokens": 8, "tokens": 6}
UP = "model.layers.1.mlp.up_proj.weight"
MISTAKES: dict[str, tuple[Change, list[str]]] = {
    "no yaml": (raw("targets: ["), ["pipeline.yaml:1: yaml: "]),
    "empty yaml": (raw(""), ["pipeline.yaml:1: expected a mapping, found nothing"]),
    "three mistakes": (
        raw("model: {sorce: model}\ntargets: [{format: gptq, group_size: 77}]\noutput: out\nwork: out\n"),
        [
            "pipeline.yaml:1: model.sorce",
            "did you mean 'source'?",
            "pipeline.yaml:2: ",
            "found 77",
            "pipeline.yaml:4: ",
        ],
    ),
    "asymmetric gptq": (
        yaml(targets=[{"format": "gptq", "symmetric": False}]),
        ["targets[0].symmetric: vLLM's AMX kernel takes symmetric GPTQ only"],
    ),
    "a name used twice": (yaml(targets=TWICE), ["targets[1].name: 'a' is used twice, first by targets[0]"]),
    "no such source": (yaml(model={"source": "./nowhere"}), ["model.source: no such file or folder"]),
    "no such package": (yaml(model={"source": "package:no_such_package"}), ["no_such_package"]),
    "no such text": (
        yaml(calibration={"dataset": {"path": "text", "data_files": "none.txt"}}),
        ["calibration.dataset.data_files: no such file: "],
    ),
    "no such column": (
        yaml(calibration={"dataset": {**DATASET, "column": "story"}, "samples": 2}),
        ["column: expected one of ['text'], found 'story'"],
    ),
    "no such split": (yaml(calibration={"dataset": {**DATASET, "split": "test"}, "samples": 2}), ['"test"']),
    "group size that does not divide": (
        yaml(targets=[{"format": "tinygemm", "group_size": 256}]),
        ["target tinygemm (tinygemm): model.layers.0.self_attn.q_proj [128, 128]: group size 256 does not divide 128"],
    ),
    "two targets with problems": (
        yaml(targets=[{"format": "gptq", "skip": ["nothing"]}, {"format": "awq", "qkv": "fused"}]),
        ["target gptq (gptq): skip: 'nothing' matches no linear", "target awq (awq): qkv: fused"],
    ),
    "missing shard": (missing_shard, ["named in model.safetensors.index.json, but there is no such file"]),
    "extra shard": (extra_shard, ["model-99999.safetensors: not named in model.safetensors.index.json"]),
    "truncated shard": (truncated_shard, ["truncated or not a safetensors file"]),
    "misshapen tensor": (misshapen_tensor, ["down_proj.weight: expected shape [128, 256], found [64, 256]"]),
    "pickled weights": (pickled, ["found pickled weights (pytorch_model.bin)", "allow_pickle: [pytorch_model.bin]"]),
    "unknown model type": (config(model_type="mamba"), ["model_type: expected one of llama,", "found 'mamba'"]),
    "no model type": (config(model_type=None), ["model_type: expected one of llama,", "found None"]),
    "nan in a weight": (tensor(UP, poke(3, 5, float("nan"))), [f"{UP}: expected finite weights, found nan at [3, 5]"]),
    "inf in a weight": (tensor(UP, poke(0, 0, float("inf"))), [f"{UP}: expected finite weights, found inf at [0, 0]"]),
    "nan in a norm": (
        tensor("model.norm.weight", lambda weight: weight[7:8].fill_(float("nan"))),
        ["model.norm.weight", "found nan at [7]"],
    ),
    "empty text": (text("\n\n"), ["the text is empty"]),
    "short texts": (
        text("only a few words"),
        ["calibration text: expected at least 4 windows of 32", "validation text: expected at least 6 windows of 32"],
    ),
    "text too short for prompts": (
        yaml(
            validation={"dataset": DATASET, "sequence_length": 32, "tokens": 64, "greedy": {**GREEDY, "prompts": 5000}}
        ),
        ["greedy prompts: expected at least 5000 windows of 8 tokens"],
    ),
    "no tokenizer": (no_tokenizer, ["expected a tokenizer (one of tokenizer.json"]),
    "tokenizer larger than the table": (
        larger_tokenizer,
        ["the tokenizer does not match the model: expected ids below 320 (config.json: vocab_size)"],
    ),
    "output is a file": (output_is_a_file, ["expected a folder, found the file"]),
    "work below a file": (work_is_below_a_file, ["work: ", "expected a folder, found the file"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_and_leaves_nothing_under_a_final_name(plain: Path, tmp_path: Path, mistake: str) -> None:
    folder = shutil.copytree(plain, tmp_path / "p")
    change, wanted = MISTAKES[mistake]
    change(folder)
    result = invoke("run", folder / "pipeline.yaml")
    # A package that is not installed is a lack of the machine.
    assert result.exit_code == (3 if mistake == "no such package" else 2), result.output
    assert result.stdout == ""
    for part in wanted:
        assert part in result.stderr, result.output
    problems = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(problems) == len(set(problems)) >= 1
    assert "Traceback" not in result.output
    for name in ("gptq", "awq", "tinygemm", "tiny", "report.json", "out"):
        assert not (folder / "output" / name).exists() and not (folder / name).exists()


def test_mistakes_in_texts_and_ids_are_found_before_any_weight_is_quantised(plain: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain, tmp_path / "p")
    text("only a few words")(folder)
    assert invoke("run", folder / "pipeline.yaml").exit_code == 2
    assert not list((folder / "work").glob("calibrate-*")) and not (folder / "output").exists()


def test_prompts_are_checked_against_the_vocabulary_too(tmp_path: Path) -> None:
    """The scored windows hold only known tokens, the greedy prompts an unknown one."""
    folder = tmp_path / "p"
    project(folder, config={"vocab_size": 511})
    tokenizer = tiny_tokenizer()
    rare = tokenizer.convert_ids_to_tokens(511).replace("Ġ", " ")
    assert tokenizer(rare, add_special_tokens=False)["input_ids"] == [511]
    (folder / "text.txt").write_text("a b c d " * 40 + rare * 4 + " e f g h" * 40)
    content = settings(
        targets=[{"format": "awq"}],
        validation={"dataset": DATASET, "sequence_length": 64, "tokens": 64, "greedy": {**GREEDY, "prompts": 40}},
    )
    del content["calibration"]
    write_yaml(folder, content)
    result = invoke("run", folder / "pipeline.yaml")
    assert result.exit_code == 2 and "expected ids below 511 (config.json: vocab_size), found 511" in result.output


def test_an_all_zero_group_is_no_mistake(plain: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(plain, tmp_path / "p")
    tensor(UP, lambda weight: weight[:4].zero_())(folder)
    result = invoke("run", folder / "pipeline.yaml")
    assert result.exit_code == 0, result.output


def test_a_process_says_the_same(plain: Path, zygote: Zygote, tmp_path: Path) -> None:
    folder = shutil.copytree(plain, tmp_path / "p")
    missing_shard(folder)
    result = zygote.run("run", folder / "pipeline.yaml")
    assert result.returncode == 2 and result.stdout == "" and "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ") and "there is no such file" in result.stderr
