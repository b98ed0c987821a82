"""What this machine, or one described by a file, can run, and which format suits it."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import psutil
from pydantic import Field

from convert.yaml_lines import Section, read
from models.errors import EnvironmentProblem

DeviceClass = Literal["x86-amx", "x86-avx512", "x86-avx2", "x86", "arm-neon", "cuda", "phone"]
Priority = Literal["speed", "fidelity"]
Count = Annotated[int, Field(ge=1)]

_X86 = ("x86_64", "amd64")
_ARM = ("aarch64", "arm64")


class Device(Section):
    """A device profile. A file needs no more than the class; `convert probe --json` writes all of it.

    Attributes:
        device_class: what decides the format; `phone` is only ever written by hand.
        machine: as `platform.machine` names the architecture.
        cpu: model name.
        cores: physical ones.
        amx_int8, amx_bf16, avx512, avx512_vnni, avx2, neon: instruction sets that may be used here.
        memory_bytes: of the machine.
        cuda_device: name of the GPU.
    """

    device_class: DeviceClass
    machine: str = ""
    cpu: str = ""
    cores: Count | None = None
    amx_int8: bool = False
    amx_bf16: bool = False
    avx512: bool = False
    avx512_vnni: bool = False
    avx2: bool = False
    neon: bool = False
    memory_bytes: Count | None = None
    cuda_device: str | None = None

    def to_json(self) -> str:
        """The profile as `read_device` reads it."""
        return self.model_dump_json(indent=2) + "\n"


class Recommendation(NamedTuple):
    """The format for a device.

    Attributes:
        reason: for the person who asked.
        verified: whether this project ran that format on that class of device.
    """

    format: Literal["gptq", "tinygemm", "bf16", "phone"]
    reason: str
    verified: bool


def read_device(path: Path) -> Device:
    """Reads a profile; raises BadInput with the line of everything that is wrong in it."""
    return read(path).validate(Device)


def probe() -> Device:
    """The profile of this machine."""
    # Slow to import, and only needed here.
    import torch

    capabilities = torch.cpu.get_capabilities()
    machine = platform.machine()
    # The kernels need the tile unit, not only its int8 instructions; a virtual machine may hide one of them.
    tile = bool(capabilities.get("amx_tile"))
    cuda_device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    flags = {
        "amx_int8": tile and bool(capabilities.get("amx_int8")),
        "amx_bf16": tile and bool(capabilities.get("amx_bf16")),
        "avx512": bool(capabilities.get("avx512_f")),
        "avx512_vnni": bool(capabilities.get("avx512_vnni")),
        "avx2": bool(capabilities.get("avx2")),
        "neon": bool(capabilities.get("neon")),
    }
    return Device(
        device_class=_device_class(machine, flags, cuda_device),
        machine=machine,
        cpu=str(capabilities.get("cpu_name") or platform.processor()),
        cores=psutil.cpu_count(logical=False) or psutil.cpu_count(),
        memory_bytes=psutil.virtual_memory().total,
        cuda_device=cuda_device,
        **flags,
    )


def _device_class(machine: str, flags: dict[str, bool], cuda_device: str | None) -> DeviceClass:
    if cuda_device is not None:
        return "cuda"
    if machine.lower() in _ARM and flags["neon"]:
        return "arm-neon"
    if machine.lower() not in _X86:
        raise EnvironmentProblem(
            f"expected an x86-64 or ARM machine, found '{machine}'; describe the device in a file that holds "
            '{"device_class": ...} instead'
        )
    if flags["amx_int8"]:
        return "x86-amx"
    if flags["avx512"]:
        return "x86-avx512"
    return "x86-avx2" if flags["avx2"] else "x86"


def recommend(device: Device, priority: Priority) -> Recommendation:
    """The format for a device, with the reason."""
    kind = device.device_class
    if kind == "cuda":
        return Recommendation("bf16", "a CUDA GPU runs the unquantised bf16 weights", True)
    if kind == "phone":
        return Recommendation("phone", "a phone's NPU runs 8-bit weights with calibrated 16-bit activations", True)
    if kind == "arm-neon":
        return Recommendation("tinygemm", "ARM with NEON has the tinygemm kernel; not verified on a device", False)
    if kind == "x86-amx" and priority == "speed":
        return Recommendation("gptq", "x86 with AMX runs GPTQ's 4-bit weights with 8-bit activations fastest", True)
    if kind == "x86-amx":
        return Recommendation(
            "tinygemm", "x86 with AMX, but fidelity matters more: tinygemm keeps activations in bf16", True
        )
    return Recommendation("tinygemm", "x86 without AMX runs 4-bit weights fastest through the tinygemm kernel", True)
