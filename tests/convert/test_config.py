"""pipeline.yaml: what is accepted, what each key's default is, and what each mistake is told."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from convert.config import Pipeline, load
from models.errors import BadInput

ROOT = Path(__file__).parents[2]

FULL: dict[str, Any] = {
    "model": {
        "source": "org/name",
        "revision": "main",
        "dtype": "float32",
        "trust_remote_code": False,
        "allow_pickle": ["pytorch_model.bin"],
    },
    "calibration": {
        "dataset": {"path": "text", "data_files": "a.txt", "split": "train", "column": "text", "name": "x"},
        "samples": 4,
        "sequence_length": 8,
        "seed": 1,
    },
    "targets": [
        {
            "name": "one",
            "format": "tinygemm",
            "group_size": 32,
            "group_size_policy": "largest-fitting",
            "symmetric": False,
            "zero": "integer",
            "method": ["rtn"],
            "lm_head": "keep",
            "skip": ["*.down_proj"],
            "qkv": "fused",
            "isa": "avx2",
        },
        {"name": "two", "format": "auto", "priority": "fidelity", "device": "device.json"},
    ],
    "validation": {
        "dataset": {"path": "text", "data_files": ["a.txt"]},
        "sequence_length": 8,
        "tokens": 64,
        "greedy": {"prompts": 4, "prompt_tokens": 5, "tokens": 6},
        "engine": True,
        "engine_tokens": 32,
        "engines": ["vllm"],
        "gates": {
            "max_perplexity_increase": 0.5,
            "max_kl": 1,
            "min_top1": 0.5,
            "min_greedy_identical": 2,
            "max_engine_gap": 0.002,
            "min_snr_db": 10,
            "max_bits_per_weight": 5,
        },
    },
    "engines": {
        "vllm": {"python": "a.txt", "w4a8": "off"},
        "gptqmodel": {"python": "a.txt"},
        "transformers": {"python": "a.txt"},
    },
    "output": {"path": "out", "shard_size": "500MB"},
    "work": "scratch",
}


def write(folder: Path, content: dict[str, Any] | str) -> Path:
    for name in ("a.txt", "device.json", "model.gguf"):
        (folder / name).touch()
    path = folder / "pipeline.yaml"
    # JSON is yaml; one key a line, so that lines can be told apart.
    text = content if isinstance(content, str) else json.dumps(content, indent=2).replace("NaN", ".nan")
    path.write_text(text, encoding="utf-8")
    return path


def problems(folder: Path, content: dict[str, Any] | str) -> list[str]:
    """The problems without the folder in front, or none."""
    path = write(folder, content)
    try:
        load(path)
    except BadInput as error:
        return [problem.replace(f"{folder}/", "") for problem in error.problems]
    return []


def with_value(keys: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    content = copy.deepcopy(FULL)
    section: Any = content
    for key in keys[:-1]:
        section = section[key]
    section[keys[-1]] = value
    return content


def one_target(**target: Any) -> dict[str, Any]:
    return {"model": {"source": "org/name"}, "targets": [target]}


def test_three_mistakes_are_all_reported_with_their_lines(tmp_path: Path) -> None:
    text = """\
model:
  source: org/name
  dtype: bf16

targets:
  - format: gptq
    grup_size: 128
  - format: awq
    symmetric: maybe
"""
    assert problems(tmp_path, text) == [
        "pipeline.yaml:3: model.dtype: expected 'bfloat16', 'float16' or 'float32', found 'bf16'; "
        "did you mean 'bfloat16'?",
        "pipeline.yaml:7: targets[0].grup_size: unknown key; did you mean 'group_size'?",
        "pipeline.yaml:9: targets[1].symmetric: expected true or false, found 'maybe'",
    ]


def test_every_key_is_accepted_with_a_right_value(tmp_path: Path) -> None:
    dumped = load(write(tmp_path, FULL)).model_dump(mode="json", exclude_unset=True)
    dumped["targets"][1].pop("name")
    expected = copy.deepcopy(FULL)
    expected["targets"][1].pop("name")
    assert dumped == expected


def test_defaults_of_a_minimal_file(tmp_path: Path) -> None:
    pipeline = load(write(tmp_path, one_target(format="gptq")))
    assert pipeline.model.dtype == "bfloat16"
    assert pipeline.model.trust_remote_code is False and pipeline.model.allow_pickle is False
    assert pipeline.calibration is None and pipeline.validation is None
    assert (pipeline.output.path, pipeline.output.shard_bytes, pipeline.work) == ("output", 2 * 10**9, "work")


def test_defaults_of_calibration_and_validation(tmp_path: Path) -> None:
    content = one_target(format="gptq")
    content["calibration"] = content["validation"] = {"dataset": {"path": "org/text"}}
    pipeline = load(write(tmp_path, content))
    calibration, validation = pipeline.calibration, pipeline.validation
    assert calibration and validation
    assert (calibration.samples, calibration.sequence_length, calibration.seed) == (64, 512, 0)
    assert (calibration.dataset.split, calibration.dataset.column) == ("train", "text")
    assert (validation.tokens, validation.engine_tokens, validation.sequence_length) == (40960, 2560, 512)
    assert tuple(validation.greedy.model_dump().values()) == (16, 32, 32)
    assert set(validation.gates.model_dump().values()) == {None}


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("model", "source"), "./missing", "model.source: no such file or folder: missing"),
        (("model", "source"), "missing.gguf", "model.source: no such file or folder: missing.gguf"),
        (("model", "source"), "a.txt", "model.source: expected a folder, a .gguf file"),
        (("model", "source"), "a/b/c", "model.source: expected an existing folder, a .gguf file, a hub id"),
        (("model", "source"), "package:", "model.source: expected 'package:<name>'"),
        (("model", "source"), "package:x/y.bin", "model.source: expected 'package:<name>'"),
        (("model", "allow_pickle"), True, "model.allow_pickle: expected false, or the list of what is allowed by name"),
        (("model", "trust_remote_code"), [1], "model.trust_remote_code: expected false, or the list"),
        (("model", "revision"), 1234567, "model.revision: expected text, found 1234567 (quotes make it text)"),
        (("calibration", "samples"), 0, "calibration.samples: expected at least 1, found 0"),
        (("calibration", "seed"), -1, "calibration.seed: expected at least 0, found -1"),
        (("calibration", "sequence_length"), 1, "calibration.sequence_length: expected at least 2, found 1"),
        (("calibration", "dataset", "data_files"), "b.txt", "calibration.dataset.data_files: no such file: b.txt"),
        (("calibration", "dataset", "data_files"), 3, "data_files: expected a file name or a list of file names"),
        (("calibration", "dataset", "path"), "./texts", "calibration.dataset.path: no such file or folder: texts"),
        (("calibration", "dataset"), None, "calibration.dataset: expected a mapping, found nothing"),
        (("targets",), [], "targets: expected at least 1 in the list, found an empty list"),
        (("targets",), {"format": "gptq"}, "targets: expected a list, found a mapping"),
        (("validation", "tokens"), 7, "validation.tokens: expected at least one window (sequence_length 8), found 7"),
        (("validation", "engine_tokens"), 65, "validation.engine_tokens: expected at most tokens (64), found 65"),
        (("validation", "greedy", "prompts"), 0, "validation.greedy.prompts: expected at least 1, found 0"),
        (("validation", "gates", "min_top1"), 95, "validation.gates.min_top1: expected at most 1, found 95"),
        (("validation", "gates", "max_kl"), float("nan"), "validation.gates.max_kl: expected a finite number"),
        (("validation", "gates", "max_bits_per_weight"), 0, "max_bits_per_weight: expected more than 0, found 0"),
        (
            ("validation", "gates", "min_greedy_identical"),
            5,
            "validation.gates.min_greedy_identical: expected at most greedy.prompts (4), found 5",
        ),
        (("validation", "engines"), ["vlm"], "validation.engines[0]: expected 'vllm', 'gptqmodel', 'transformers', "),
        (("engines", "vllm", "python"), "bin/python", "engines.vllm.python: no such file: bin/python"),
        (("engines", "vllm", "w4a8"), True, "engines.vllm.w4a8: expected 'auto', 'on' or 'off', found true"),
        (("engines", "vllm", "pyton"), "x", "engines.vllm.pyton: unknown key"),
        (("output", "shard_size"), "2 gigs", "output.shard_size: expected a size such as 500MB or 2GB, found '2 gigs'"),
        (("output",), "./scratch", "work: expected a folder other than output ('./scratch')"),
    ],
)
def test_a_bad_value_is_refused_with_what_was_expected(
    tmp_path: Path, keys: tuple[str | int, ...], value: Any, message: str
) -> None:
    content = with_value(keys, value)
    if keys == ("model", "source"):
        del content["model"]["revision"]
    (problem,) = problems(tmp_path, content)
    assert message in problem


def test_without_the_engine_its_keys_and_gate_are_refused_each_at_its_line(tmp_path: Path) -> None:
    content = with_value(("validation", "engine"), False)
    content["validation"]["engines"] = []
    found = problems(tmp_path, content)
    lines = (tmp_path / "pipeline.yaml").read_text().splitlines()
    assert [lines[int(problem.split(":")[1]) - 1].strip() for problem in found] == [
        '"engine_tokens": 32,',
        '"max_engine_gap": 0.002,',
    ]


def test_a_revision_of_a_local_source_is_refused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, with_value(("model", "source"), "model.gguf"))
    assert "model.revision: only a hub id has revisions" in problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [1,\ntargets: 2\n", "pipeline.yaml:3: yaml: expected ',' or ']'"),
        ("model: 1\nmodel: 2\n", 'pipeline.yaml:2: yaml: found duplicate key "model"'),
        ("model: &a\n  b: *a\n", "yaml: an alias inside its own anchor"),
        ("model: 1\nwork: !!python/name:os.system x\n", "pipeline.yaml:2: yaml: could not determine a constructor"),
        ("model: 1\nwork: \x01\n", "pipeline.yaml:2: yaml: a character that yaml does not allow"),
        ("", "pipeline.yaml:1: expected a mapping, found nothing"),
        ("- model\n", "pipeline.yaml:1: expected a mapping, found a list"),
        ("1: 2\nmodel: {source: a/b}\ntargets: [{format: awq}]\n", "pipeline.yaml:1: [1]: expected a key that is text"),
    ],
)
def test_a_file_that_is_no_pipeline_is_refused_at_its_line(tmp_path: Path, text: str, message: str) -> None:
    (problem,) = problems(tmp_path, text)
    assert message in problem


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"none\.yaml: cannot be read: No such file"):
        load(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"model: \xff")
    with pytest.raises(BadInput, match=r"binary\.yaml: expected UTF-8 text, found byte 0xff"):
        load(tmp_path / "binary.yaml")


def test_a_misspelt_required_key_is_one_problem(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, {"model": {"sorce": "org/name"}, "targets": [{"format": "gptq"}]})
    assert problem == "pipeline.yaml:3: model.sorce: unknown key; did you mean 'source'?"


def test_a_missing_key_is_reported_at_its_section(tmp_path: Path) -> None:
    text = "model: {source: a/b}\ntargets:\n  - format: awq\n  - name: x\n"
    assert problems(tmp_path, text) == ["pipeline.yaml:4: targets[1].format: this key is required, and missing"]


def test_an_unknown_key_like_none_lists_the_known_ones(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, with_value(("validation", "greedy", "zzz"), 1))
    assert problem.endswith("validation.greedy.zzz: unknown key; known keys: prompts, prompt_tokens, tokens")


def test_merged_keys_are_reported_where_they_stand(tmp_path: Path) -> None:
    text = """\
model: {source: a/b}
targets:
  - &base
    format: gptq
    grop_size: 32
  - <<: *base
    name: second
"""
    assert [problem.split(" ")[:2] for problem in problems(tmp_path, text)] == [
        ["pipeline.yaml:5:", "targets[0].grop_size:"],
        ["pipeline.yaml:5:", "targets[1].grop_size:"],
    ]


def sections(content: Any, at: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    found = [at] if isinstance(content, dict) else []
    return found + [place for key, value in items for place in sections(value, (*at, key))]


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_misspelt_key_anywhere_is_refused_at_its_line(tmp_path: Path, data: st.DataObject) -> None:
    content = copy.deepcopy(FULL)
    section: Any = content
    at = data.draw(st.sampled_from(sections(content)))
    for step in at:
        section = section[step]
    key = data.draw(st.sampled_from(list(section)))
    place = data.draw(st.integers(0, len(key) - 1))
    letter = data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz_"))
    wrong = data.draw(
        st.sampled_from([key[:place] + key[place + 1 :], key[:place] + letter + key[place:], key[:place] + letter])
    )
    assume(wrong and wrong not in section)
    section[wrong] = section.pop(key)
    found = [problem for problem in problems(tmp_path, content) if f"{wrong}: unknown key" in problem]
    assert len(found) == 1
    line = (tmp_path / "pipeline.yaml").read_text().splitlines()[int(found[0].split(":")[1]) - 1]
    assert wrong in line


def test_paths_start_at_the_yaml_wherever_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    content = with_value(("model",), {"source": "weights"})
    content["validation"]["dataset"]["data_files"] = ["a.txt", "*.txt"]
    path = write(tmp_path, content)
    monkeypatch.chdir(tmp_path.parent)
    pipeline = load(path.relative_to(tmp_path.parent))
    assert (pipeline.folder, pipeline.path.name) == (tmp_path, "pipeline.yaml")
    assert pipeline.source == str(tmp_path / "weights")
    assert (pipeline.output_folder, pipeline.work_folder) == (tmp_path / "out", tmp_path / "scratch")
    assert pipeline.device_file(pipeline.targets[1]) == tmp_path / "device.json"
    assert pipeline.device_file(pipeline.targets[0]) is None
    assert pipeline.validation and pipeline.calibration
    assert pipeline.dataset_arguments(pipeline.validation.dataset) == {
        "path": "text",
        "split": "train",
        "data_files": [str(tmp_path / "a.txt"), str(tmp_path / "*.txt")],
    }
    assert pipeline.dataset_arguments(pipeline.calibration.dataset)["name"] == "x"


@pytest.mark.parametrize(
    ("source", "resolved"),
    [("org/name", "org/name"), ("gpt2", "gpt2"), ("package:llm_x/y.gguf", "package:llm_x/y.gguf")],
)
def test_sources_that_are_not_paths_stay_as_they_are(tmp_path: Path, source: str, resolved: str) -> None:
    assert load(write(tmp_path, with_value(("model",), {"source": source}))).source == resolved


def test_hub_data_sets_keep_their_own_file_names_and_local_folders_become_absolute(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    content = with_value(("calibration", "dataset"), {"path": "org/set", "data_files": "en/*.json"})
    content["validation"]["dataset"] = {"path": "corpus"}
    pipeline = load(write(tmp_path, content))
    assert pipeline.validation and pipeline.calibration
    assert pipeline.dataset_arguments(pipeline.calibration.dataset)["data_files"] == ["en/*.json"]
    assert pipeline.dataset_arguments(pipeline.validation.dataset)["path"] == str(tmp_path / "corpus")


def test_the_dump_holds_no_machine_paths_and_the_models_are_frozen(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    pipeline = load(write(tmp_path, with_value(("model",), {"source": "weights"})))
    assert str(tmp_path) not in json.dumps(pipeline.model_dump(mode="json"))
    with pytest.raises(ValueError, match="frozen"):
        pipeline.work = "other"


def test_a_plain_output_is_its_path(tmp_path: Path) -> None:
    assert load(write(tmp_path, with_value(("output",), "x"))).output.path == "x"
    assert load(write(tmp_path, FULL)).output.shard_bytes == 500 * 10**6


@pytest.mark.parametrize("name", ["pipeline.yaml", "examples/smollm2.yaml"])
def test_the_files_we_ship_load_and_cover_the_three_formats(name: str) -> None:
    pipeline: Pipeline = load(ROOT / name)
    assert [target.format for target in pipeline.targets] == ["gptq", "awq", "tinygemm"]
    assert pipeline.calibration and pipeline.validation
