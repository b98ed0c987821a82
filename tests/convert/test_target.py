"""Targets of a pipeline.yaml: each format's defaults, the rules between keys, and what `auto` comes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from calibrate.composition import composition_problems
from convert.config import load
from convert.target import QUALITY, Target
from export.phone.options import PhoneOptions
from models.errors import BadInput


def write(folder: Path, *targets: dict[str, Any]) -> Path:
    (folder / "device.json").touch()
    path = folder / "pipeline.yaml"
    path.write_text(json.dumps({"model": {"source": "org/name"}, "targets": targets}), encoding="utf-8")
    return path


def only_target(folder: Path, **target: Any) -> Target:
    return load(write(folder, target)).targets[0]


def problems(folder: Path, *targets: dict[str, Any]) -> list[str]:
    with pytest.raises(BadInput) as error:
        load(write(folder, *targets))
    return [problem.replace(f"{folder}/", "") for problem in error.value.problems]


@pytest.mark.parametrize(
    ("format", "group_size", "symmetric", "zero", "lm_head"),
    [
        ("gptq", 128, True, "none", "quantize"),
        ("awq", 64, False, "integer", "keep"),
        ("tinygemm", 64, False, "float", "keep"),
    ],
)
def test_defaults_of_each_format_also_when_auto_comes_to_it(
    tmp_path: Path, format: str, group_size: int, symmetric: bool, zero: str, lm_head: str
) -> None:
    named = only_target(tmp_path, format=format)
    resolved = only_target(tmp_path, format="auto").resolve(format)
    for target in (named, resolved):
        assert target.format == format
        assert (target.group_size, target.symmetric, target.zero, target.lm_head) == (
            group_size,
            symmetric,
            zero,
            lm_head,
        )
        assert (target.method, target.group_size_policy, target.qkv, target.isa) == (["search"], "error", None, "auto")
    assert (named.name, resolved.name) == (format, "auto")


def test_a_phone_target_has_its_own_keys(tmp_path: Path) -> None:
    assert only_target(tmp_path, format="phone").phone_options == PhoneOptions()
    assert only_target(tmp_path, format="auto").resolve("phone").phone_options == PhoneOptions()
    given = only_target(
        tmp_path,
        format="phone",
        context=256,
        prefill=32,
        activations="uint8",
        embedding="float",
        gelu="tanh",
        split={"parts": 5},
        i_know=["uint8-activations"],
    )
    assert given.phone_options == PhoneOptions(256, 32, "uint8", "int8", "float", "tanh", 5, 23, ("uint8-activations",))
    assert only_target(tmp_path, format="phone", split="none").phone_options.parts == 1
    assert only_target(tmp_path, format="phone", context=64).phone_options.prefill == 64
    with pytest.raises(BadInput, match="group_size: only for format gptq"):
        only_target(tmp_path, format="auto", group_size=64).resolve("phone")


def test_resolve_keeps_what_the_file_says_and_drops_what_only_auto_reads(tmp_path: Path) -> None:
    target = only_target(
        tmp_path, name="edge", format="auto", group_size=32, lm_head="keep", isa="avx2", device="device.json"
    )
    gptq = target.resolve("gptq")
    assert (gptq.name, gptq.group_size, gptq.lm_head, gptq.isa, gptq.device) == ("edge", 32, "keep", "auto", None)
    assert target.resolve("tinygemm").isa == "avx2"
    assert gptq.resolve("tinygemm") is gptq


def test_resolve_refuses_values_that_do_not_suit_the_format(tmp_path: Path) -> None:
    target = only_target(tmp_path, name="edge", format="auto", group_size=256, symmetric=False)
    with pytest.raises(BadInput) as error:
        target.resolve("gptq")
    assert [problem.split(": ", 2)[1] for problem in error.value.problems] == ["group_size", "symmetric"]
    assert "edge" in error.value.problems[0]
    with pytest.raises(BadInput, match="bf16, which no writer makes"):
        target.resolve("bf16")


@pytest.mark.parametrize(
    ("target", "key", "message"),
    [
        ({"format": "gptq", "symmetric": False}, "symmetric", "vLLM's AMX kernel takes symmetric GPTQ only"),
        ({"format": "awq", "symmetric": True}, "symmetric", "for a symmetric grid use format gptq"),
        ({"format": "awq", "zero": "float"}, "zero", "AWQ files hold 4-bit integer zero points"),
        ({"format": "gptq", "zero": "integer"}, "zero", "a symmetric grid has no zero"),
        ({"format": "tinygemm", "symmetric": True, "zero": "float"}, "zero", "a symmetric grid has no zero"),
        ({"format": "tinygemm", "zero": "none"}, "zero", "expected 'float' or 'integer', found 'none'"),
        ({"format": "gptq", "group_size": 256}, "group_size", "expected one of 32, 64, 128, -1 for gptq, found 256"),
        ({"format": "awq", "group_size": 16}, "group_size", "expected one of 32, 64, 128, -1 for awq, found 16"),
        ({"format": "tinygemm", "group_size": -1}, "group_size", "expected one of 32, 64, 128, 256 for tinygemm"),
        ({"format": "auto", "group_size": 96}, "group_size", "expected one of 32, 64, 128, -1, 256 for auto"),
        ({"format": "gptq", "group_size": "128"}, "group_size", "expected a whole number, found '128'"),
        ({"format": "gptq", "group_size": True}, "group_size", "expected a whole number, found true"),
        ({"format": "gptq", "isa": "avx2"}, "isa", "only for format tinygemm or auto; this target's format is gptq"),
        ({"format": "awq", "priority": "speed"}, "priority", "only for format auto"),
        ({"format": "gptq", "device": "device.json"}, "device", "only for format auto"),
        ({"format": "auto", "device": "nowhere.json"}, "device", "no such file: nowhere.json"),
        ({"format": "gptq", "method": "serch"}, "method", "unknown method 'serch'; did you mean 'search'?"),
        ({"format": "gptq", "method": ["zzz"]}, "method", "unknown method 'zzz'; known: fold, rotate, awq, fisher"),
        ({"format": "gptq", "method": ["rotat", "gptq"]}, "method", "unknown method 'rotat'; did you mean 'rotate'?"),
        ({"format": "gptq", "method": ["gptq", "awq"]}, "method", "methods work in one order: write [awq, gptq]"),
        ({"format": "gptq", "method": ["rotate", "awq"]}, "method", "nothing chooses the codes: name one of rtn"),
        ({"format": "gptq", "method": ["fold", "rotate", "rtn"]}, "method", "fold and rotate each fold the norms"),
        ({"format": "gptq", "quality": "fats"}, "quality", "did you mean 'fast'?"),
        ({"format": "phone", "quality": "fast"}, "quality", "only for format gptq or awq or tinygemm or auto"),
        ({"format": "gptq", "method": ["rtn", "search"]}, "method", "rtn and search each choose the codes"),
        ({"format": "gptq", "method": "refine"}, "method", "nothing chooses the codes: name one of rtn, search, gptq"),
        ({"format": "gptq", "method": ["refine", "gptq"]}, "method", "methods work in one order: write [gptq, refine]"),
        ({"format": "gptq", "method": []}, "method", "expected at least 1 in the list, found an empty list"),
        ({"format": "gptq", "name": "a/b"}, "name", "expected a folder name of letters"),
        ({"format": "gptq", "name": ".."}, "name", "expected a folder name of letters"),
        ({"format": "gptq", "name": 4}, "name", "expected text, found 4 (quotes make it text)"),
        ({"format": "gptq", "lm_head": "drop"}, "lm_head", "expected 'quantize' or 'keep', found 'drop'"),
        ({"format": "gptq", "qkv": "fuse"}, "qkv", "did you mean 'fused'?"),
        ({"format": "gptq", "skip": "lm_head"}, "skip", "expected a list, found 'lm_head'"),
        ({"format": "gptq", "context": 512}, "context", "only for format phone; this target's format is gptq"),
        ({"format": "auto", "activations": "uint16"}, "activations", "only for format phone"),
        ({"format": "awq", "split": "none"}, "split", "only for format phone"),
        ({"format": "phone", "group_size": 64}, "group_size", "only for format gptq or awq or tinygemm or auto"),
        ({"format": "phone", "symmetric": True}, "symmetric", "this target's format is phone"),
        ({"format": "phone", "skip": ["lm_head"]}, "skip", "this target's format is phone"),
        ({"format": "phone", "isa": "avx2"}, "isa", "only for format tinygemm or auto"),
        ({"format": "phone", "method": "awq"}, "method", "unknown method 'awq' for format phone"),
        ({"format": "phone", "method": ["gptq", "rotate"]}, "method", "work in one order: write [rotate, gptq]"),
        ({"format": "phone", "method": ["fold", "rotate", "rtn"]}, "method", "fold and rotate each fold the norms"),
        ({"format": "phone", "method": "rotate"}, "method", "nothing chooses the codes"),
        ({"format": "phone", "context": 64, "prefill": 128}, "prefill", "expected at most context (64), found 128"),
        ({"format": "phone", "context": 1}, "context", "expected at least 2, found 1"),
        ({"format": "phone", "activations": "uint8"}, "activations", "measured broken: 8-bit activations gave 5.1 dB"),
        ({"format": "phone", "activations": "uint8"}, "activations", "all the same: `i_know: [uint8-activations]`"),
        ({"format": "phone", "i_know": ["uint8_activation"]}, "i_know", "did you mean 'uint8-activations'?"),
        ({"format": "phone", "weights": "int4"}, "weights", "expected 'int8', found 'int4'"),
        ({"format": "phone", "split": "some"}, "split", "expected none, or {parts: N}, found 'some'"),
        ({"format": "phone", "split": {"parts": 2}}, "split.parts", "expected at least 3, found 2"),
        ({"format": "phone", "split": {"part": 4}}, "split.part", "unknown key; did you mean 'parts'?"),
        ({"format": "phone", "opset": 21}, "opset", "expected 23, found 21: before 23 the norm is taken apart"),
    ],
)
def test_a_target_that_breaks_a_rule_is_refused_with_the_reason(
    tmp_path: Path, target: dict[str, Any], key: str, message: str
) -> None:
    (problem,) = problems(tmp_path, target)
    assert f": targets[0].{key}: " in problem
    assert message in problem


def test_tinygemm_takes_a_symmetric_grid_and_integer_zeros(tmp_path: Path) -> None:
    assert only_target(tmp_path, format="tinygemm", symmetric=True).zero == "none"
    assert only_target(tmp_path, format="tinygemm", zero="integer").zero == "integer"


def test_a_whole_row_is_a_group_size_of_gptq_and_awq(tmp_path: Path) -> None:
    assert [only_target(tmp_path, format=f, group_size=-1).group_size for f in ("gptq", "awq")] == [-1, -1]


@pytest.mark.parametrize("names", [("a", "a"), ("a", "A"), (None, None), ("gptq", None)])
def test_a_target_name_used_twice_is_refused_beside_other_problems(
    tmp_path: Path, names: tuple[str | None, str | None]
) -> None:
    targets = [{"format": "gptq", "qvk": "split"} | ({"name": name} if name else {}) for name in names]
    found = problems(tmp_path, *targets)
    assert len(found) == 3
    assert any("targets[1].name" in problem and "is used twice, first by targets[0]" in problem for problem in found)


def test_a_quality_is_a_list_of_methods_for_every_format(tmp_path: Path) -> None:
    for quality, usual in QUALITY.items():
        for format in ("gptq", "awq", "tinygemm"):
            # The kernel that serves gptq rounds activations to int8.
            methods = [*(["awq"] if format == "gptq" and quality != "fast" else []), *usual]
            named = Target.model_validate({"format": format, "quality": quality}, context=tmp_path)
            auto = Target.model_validate({"format": "auto", "quality": quality}, context=tmp_path)
            resolved = auto.resolve(format)
            assert named.method == resolved.method == methods and resolved.quality == quality
            assert composition_problems(methods) == []


def test_a_quality_beside_a_method_is_refused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, {"format": "gptq", "quality": "balanced", "method": "rtn"})
    assert "targets[0].method: `quality: balanced` stands for [awq, gptq, refine] already" in problem


def test_one_method_may_stand_without_a_list(tmp_path: Path) -> None:
    assert only_target(tmp_path, format="gptq", method="rtn").method == ["rtn"]
