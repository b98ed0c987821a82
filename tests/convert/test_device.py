"""The device probe, its file, and the format it leads to."""

from __future__ import annotations

import platform
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from convert.device import Device, DeviceClass, Priority, probe, read_device, recommend
from models.errors import BadInput, EnvironmentProblem


@pytest.mark.parametrize(
    ("device_class", "priority", "format", "verified"),
    [
        ("x86-amx", "speed", "gptq", True),
        ("x86-amx", "fidelity", "tinygemm", True),
        ("x86-avx512", "speed", "tinygemm", True),
        ("x86-avx512", "fidelity", "tinygemm", True),
        ("x86-avx2", "speed", "tinygemm", True),
        ("x86", "speed", "tinygemm", True),
        ("arm-neon", "speed", "tinygemm", False),
        ("arm-neon", "fidelity", "tinygemm", False),
        ("phone", "speed", "phone", True),
        ("cuda", "fidelity", "bf16", True),
    ],
)
def test_recommended_format_of_each_device(
    device_class: DeviceClass, priority: Priority, format: str, verified: bool
) -> None:
    recommendation = recommend(Device(device_class=device_class), priority)
    assert (recommendation.format, recommendation.verified) == (format, verified)
    words = {"x86-amx": "AMX", "arm-neon": "ARM", "phone": "phone", "cuda": "CUDA"}
    assert words.get(device_class, "without AMX") in recommendation.reason


@pytest.mark.parametrize(
    ("machine", "capabilities", "cuda", "device_class"),
    [
        ("x86_64", {"amx_tile": True, "amx_int8": True, "avx512_f": True, "avx2": True}, None, "x86-amx"),
        ("x86_64", {"amx_int8": True, "avx512_f": True, "avx2": True}, None, "x86-avx512"),
        ("x86_64", {"amx_tile": True, "amx_bf16": True, "avx512_f": True}, None, "x86-avx512"),
        ("AMD64", {"avx2": True}, None, "x86-avx2"),
        ("x86_64", {}, None, "x86"),
        ("aarch64", {"neon": True}, None, "arm-neon"),
        ("arm64", {"neon": True}, None, "arm-neon"),
        ("x86_64", {"amx_tile": True, "amx_int8": True}, "A GPU", "cuda"),
    ],
)
def test_device_class_follows_from_what_the_processor_reports(
    monkeypatch: pytest.MonkeyPatch, machine: str, capabilities: dict[str, Any], cuda: str | None, device_class: str
) -> None:
    pretend(monkeypatch, machine, capabilities, cuda)
    device = probe()
    assert (device.device_class, device.machine, device.cuda_device) == (device_class, machine, cuda)


def pretend(monkeypatch: pytest.MonkeyPatch, machine: str, capabilities: dict[str, Any], cuda: str | None) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: cuda)


def test_flags_and_sizes_are_those_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = {
        "amx_tile": True,
        "amx_int8": False,
        "amx_bf16": True,
        "avx512_f": True,
        "avx512_vnni": False,
        "avx2": True,
        "cpu_name": "A CPU",
    }
    pretend(monkeypatch, "x86_64", reported, None)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=123))
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 8 if logical else None)
    assert probe() == Device(
        device_class="x86-avx512",
        machine="x86_64",
        cpu="A CPU",
        cores=8,
        amx_bf16=True,
        avx512=True,
        avx2=True,
        memory_bytes=123,
    )


def test_an_architecture_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "riscv64", {}, None)
    with pytest.raises(EnvironmentProblem, match="expected an x86-64 or ARM machine, found 'riscv64'"):
        probe()


def test_this_machine_survives_its_file(tmp_path: Path) -> None:
    device = probe()
    assert device.memory_bytes and device.memory_bytes > 2**28
    path = tmp_path / "device.json"
    path.write_text(device.to_json())
    assert read_device(path) == device


def test_a_profile_written_by_hand_needs_only_its_class(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text('{"device_class": "phone"}')
    assert read_device(path) == Device(device_class="phone")


def test_a_wrong_profile_names_key_expected_and_found(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text('{\n\t"device_class": "x86-amy",\n\t"cores": "8",\n\t"amx_in8": true,\n\t"memory_bytes": 0\n}\n')
    with pytest.raises(BadInput) as error:
        read_device(path)
    classes = "'x86-amx', 'x86-avx512', 'x86-avx2', 'x86', 'arm-neon', 'cuda' or 'phone'"
    assert error.value.problems == [
        f"{path}:2: device_class: expected {classes}, found 'x86-amy'; did you mean 'x86-amx'?",
        f"{path}:3: cores: expected a whole number, found '8'",
        f"{path}:4: amx_in8: unknown key; did you mean 'amx_int8'?",
        f"{path}:5: memory_bytes: expected at least 1, found 0",
    ]
