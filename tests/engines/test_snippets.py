"""What a published artifact's card tells people to run, run as it stands there: in the engines, from a hub on loopback.

The snippets that need no engine are run by `tests/convert/test_upload.py`. Spark-X2.5 is not here: its code asks for a
newer transformers than vLLM's environment has.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from convert.snippets import snippets
from export.tinygemm import host_isa
from tests.engines.processor import WNA16
from tests.hub_server import TOKEN, Hub, serve
from tests.workshop import Workshop, spec
from validate.engines.run import ENGINES, FOREIGN

CASES = [
    ("llama-untied", "gptq"),
    ("llama-untied", "awq"),
    ("llama-untied", "tinygemm"),
]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    workshop = Workshop(tmp_path_factory.mktemp("snippets"))
    with serve() as hub:
        for case, format in CASES:
            isa = host_isa() if format == "tinygemm" else ""
            built = workshop.built(case, spec(format, quantize_head=False, isa=isa))
            folder = built.artifact.folder
            hub.add(repo_of(case, format), {path.name: path.read_bytes() for path in folder.iterdir()})
        yield hub


def repo_of(case: str, format: str) -> str:
    return f"someone/{case}-{format}".replace("_", "-")


def code_of(case: str, format: str, engine: str) -> list[str]:
    found = snippets(format, "llama", repo_of(case, format), "bfloat16")
    return [snippet.code for snippet in found if snippet.engine == engine]


def execute(code: str, engine: str, python: Path, hub: Hub, folder: Path) -> str:
    own = {k: v for k, v in os.environ.items() if k not in FOREIGN and not k.startswith("HF_")}
    online = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
    (folder / "snippet.py").write_text(code)
    # As people run it, torch.compile included; only that vLLM stays in one process, where its errors reach us.
    settings = {k: v for k, v in ENGINES[engine].environment.items() if k != "TORCHDYNAMO_DISABLE"}
    result = subprocess.run(
        [python, "snippet.py"],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=folder,
        env={**own, **settings, **online},
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize(
    "case, format", [pytest.param(*case, marks=() if case[1] == "tinygemm" else WNA16) for case in CASES]
)
def test_the_snippets_for_vllm_run(hub: Hub, engines_python: Path, tmp_path: Path, case: str, format: str) -> None:
    (code,) = code_of(case, format, "vllm")
    lines = [
        line for line in execute(code, "vllm", engines_python, hub, tmp_path).splitlines() if line.startswith("The sea")
    ]
    assert len(lines) == 1 and len(lines[0]) > len("The sea")


@pytest.mark.parametrize("engine", ["gptqmodel", "transformers"])
def test_the_snippets_for_torch_run(hub: Hub, engines_python: Path, tmp_path: Path, engine: str) -> None:
    codes = [code for case, format in CASES for code in code_of(case, format, engine)]
    assert len(codes) == {"gptqmodel": 2, "transformers": 3}[engine]
    output = execute("\n".join(codes), engine, engines_python, hub, tmp_path)
    continued = [line for line in output.splitlines() if line.startswith("The sea")]
    assert len(continued) == len(codes) and all(len(line) > len("The sea") for line in continued)
