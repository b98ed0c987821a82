"""`convert upload`: what is refused, what the card says, and the real command line against a hub on loopback."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from convert.card import Origin, model_card
from convert.snippets import snippets
from export.artifact import Artifact
from export.layouts import LAYOUTS
from export.phone.manifest import FILE as MANIFEST
from tests.helpers import MODEL_TYPES
from tests.hub_server import TOKEN, Hub, serve
from tests.runs import TARGETS, TIMEOUT, Zygote, environment, invoke, project, settings, write_yaml

Copy = Callable[[], Path]
REPO = "someone/tiny-{target}"
PHONE = {"name": "phone", "format": "phone", "context": 64, "prefill": 16, "method": ["fold", "rtn"]}
CHOSEN = (TARGETS[0], TARGETS[2], PHONE)
UPLOADED = [f"tiny-{target['name']}" for target in CHOSEN]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serve() as hub:
        yield hub


@pytest.fixture(scope="module")
def online(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that takes the loopback for the hub."""
    own = {key: value for key, value in environment().items() if not key.startswith("HF_")}
    home = str(tmp_path_factory.mktemp("hub-home"))
    # The client's other way to upload needs a storage of another protocol.
    return {**own, "HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}


@pytest.fixture(scope="module")
def convert(online: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """The command line of such processes."""
    process = Zygote(online, tmp_path_factory.mktemp("online"))
    yield process
    process.close()


def ledger(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Changes an artifact's ledger."""
    file = folder / "conversion.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    return folder


# ---- what is refused, before the hub is asked


def test_an_artifact_that_was_never_validated_is_refused(copy: Copy) -> None:
    folder = ledger(copy() / "output" / "gptq", lambda content: content.update(validation=None))
    result = invoke("upload", folder, "--repo", "a/b")
    assert result.exit_code == 2
    assert result.output.startswith(f"error: {folder}: was never validated; `convert run` and `convert validate`")


def test_an_artifact_that_failed_a_gate_is_refused_with_the_gate(copy: Copy) -> None:
    gate = {"gate": "max_kl", "bound": 0.1, "measured": 0.3, "passed": False, "note": ""}

    def fail(content: dict[str, Any]) -> None:
        content["validation"]["report"]["gates"] = [gate]

    folder = ledger(copy() / "output" / "gptq", fail)
    result = invoke("upload", folder, "--repo", "a/b")
    assert result.exit_code == 1
    assert result.output == f"error: {folder}: max_kl: expected 0.1, found 0.3\n"


def test_bytes_that_changed_are_refused(copy: Copy) -> None:
    folder = copy() / "output" / "gptq"
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    result = invoke("upload", folder, "--repo", "a/b")
    assert result.exit_code == 2 and "model.safetensors: its bytes are not those that were written" in result.output


def test_a_validation_of_other_bytes_is_refused(copy: Copy) -> None:
    folder = copy() / "output" / "gptq"
    config = folder / "generation_config.json"
    config.write_bytes(config.read_bytes() + b"\n")
    digest = hashlib.sha256(config.read_bytes()).hexdigest()
    ledger(folder, lambda content: content["files"].update({"generation_config.json": digest}))
    result = invoke("upload", folder, "--repo", "a/b")
    assert result.exit_code == 2 and "its validation is older than its bytes" in result.output


def test_a_manifest_that_is_none_is_refused_by_name(copy: Copy) -> None:
    folder = copy()
    (folder / "output" / "gptq" / MANIFEST).write_text("{}")
    for name, *rest in (("upload", "--repo", "a/b"), ("explain", "--reference", folder / "model")):
        result = invoke(name, folder / "output" / "gptq", *rest)
        assert result.exit_code == 2 and "manifest.json: expected the graphs' manifest" in result.output


def test_a_ledger_of_a_newer_schema_is_refused(copy: Copy) -> None:
    folder = ledger(copy() / "output" / "gptq", lambda content: content.update(schema=99))
    result = invoke("upload", folder, "--repo", "a/b")
    assert result.exit_code == 2 and "conversion.json: schema: expected 1, found 99" in result.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("output/gptq", "--repo", "gptq"), "--repo gptq: expected owner/name, found no owner"),
        (("output/gptq", "--repo", "some one/x"), "--repo some one/x: expected owner/name"),
        (("output/gptq",), "--repo: expected owner/name"),
        (("output/gptq", "--repo", "a/b", "--only", "gptq"), "--only: goes with a pipeline.yaml"),
        (("model", "--repo", "a/b"), "expected an artifact (a folder with conversion.json) or a pipeline.yaml"),
        (("pipeline.yaml", "--repo", "a/b"), "3 artifacts (gptq, awq, tiny) need a repository each: put {target}"),
        (("pipeline.yaml", "--repo", "a/b", "--only", "gpdq"), "--only gpdq: no such target; did you mean 'gptq'?"),
        (("pipeline.yaml",), "pipeline.yaml has no `upload:`"),
    ],
)
def test_a_mistaken_destination_is_told(finished: Path, arguments: tuple[str, ...], message: str) -> None:
    path, *rest = arguments
    result = invoke("upload", finished / path, *rest)
    assert result.exit_code == 2 and message in result.output, result.output


def test_offline_nothing_is_tried(finished: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.requests.clear()
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    # As the tests' own environment is.
    result = invoke("upload", finished / "output" / "gptq", "--repo", "a/b")
    assert result.exit_code == 3 and "HF_HUB_OFFLINE is set" in result.output
    assert hub.requests == []


# ---- the card


def card_of(folder: Path, **origin: str) -> ModelCard:
    return model_card(Artifact(folder), "someone/tiny-gptq", Origin(**origin))


def test_the_card_holds_what_was_measured(finished: Path) -> None:
    report = json.loads((finished / "output" / "report.json").read_text())
    for target in report["targets"]:
        folder = finished / "output" / target["name"]
        card = card_of(folder)
        assert f"{target['perplexity_ratio']:.4f} ± {target['perplexity_ratio_se']:.4f} (paired)" in card.text
        assert f"{target['greedy']['identical']}/{target['greedy']['of']}" in card.text
        assert "text.txt, in 6 windows of 32" in card.text and "No gate was set" in card.text
        results = {result.metric_type: result for result in card.data.eval_results or []}
        assert results["perplexity"].metric_value == target["perplexity"]
        assert results["kl"].metric_value == target["kl"] and results["kl"].dataset_name == "text.txt"
        assert "{" not in re.sub(r"```.*?```", "", card.text, flags=re.S), "a placeholder was left"
        assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()


def test_the_same_bytes_give_the_same_card(finished: Path) -> None:
    folder = finished / "output" / "awq"
    assert str(card_of(folder)) == str(card_of(folder))


def test_a_source_from_the_hub_is_the_base_model(copy: Copy) -> None:
    folder = copy() / "output" / "gptq"
    assert card_of(folder).data.base_model is None
    ledger(folder, lambda content: content["source"].update(hub=True, name="owner/source"))
    card = card_of(folder)
    assert card.data.base_model == "owner/source" and card.data["base_model_relation"] == "quantized"
    assert "[owner/source](https://huggingface.co/owner/source) in 4 bits" in card.text
    assert card_of(folder, base_model="other/base").data.base_model == "other/base"


def test_the_licence_is_the_sources(copy: Copy) -> None:
    folder = copy() / "output" / "gptq"
    assert card_of(folder).data.license is None and "The source states no licence" in card_of(folder).text
    assert card_of(folder, license="mit").data.license == "mit"
    ledger(folder, lambda content: content["source"].update(license="apache-2.0"))
    assert card_of(folder).data.license == "apache-2.0"
    (folder / "README.source.md").write_text("---\nlicense: gemma\nlanguage: [en, de]\ntags: [x]\n---\n# Source\n")
    card = card_of(folder)
    assert card.data.license == "gemma" and card.data.language == ["en", "de"] and "x" not in (card.data.tags or [])
    assert "states no licence" not in card.text
    (folder / "README.source.md").unlink()
    ledger(folder, lambda content: (content["source"].pop("license"), content["files"].update(LICENSE="0")))
    data = card_of(folder).data
    assert (data.license, data.license_name, data.license_link) == ("other", "source", "LICENSE")


def test_what_the_artifact_does_not_do_is_said(copy: Copy) -> None:
    folder = copy() / "output" / "tiny"

    def change(content: dict[str, Any]) -> None:
        content["notes"] = ["a note with a | and\na line break"]
        content["calibration"] = None
        content["validation"]["report"]["engine"] = {"name": "an engine", "skipped": "why not"}

    text = card_of(ledger(folder, change)).text
    for line in (
        r"* a note with a \| and a line break",
        " tensors stay as they are: ",
        "* Not measured: an engine (why not)",
        "* The bytes are packed for ",
        "* No text was used for calibration",
    ):
        assert line in text, line


def test_gates_that_held_are_in_the_card(copy: Copy) -> None:
    gate = {"gate": "max_kl", "bound": 2, "measured": 0.34567, "passed": True, "note": ""}
    folder = ledger(copy() / "output" / "gptq", lambda c: c["validation"]["report"].update(gates=[gate]))
    assert "| `max_kl` | 2 | 0.3457 | held |" in card_of(folder).text


@pytest.mark.parametrize("format", [*LAYOUTS, "phone"])
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_format_and_family_has_snippets_that_are_python(format: str, model_type: str) -> None:
    found = snippets(format, model_type, "owner/name-1.7B", "bfloat16")
    assert len(found) >= 2
    for snippet in found:
        compile(snippet.code, snippet.title, "exec")
        assert '"owner/name-1.7B"' in snippet.code and "{" not in snippet.code


# ---- the command line


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, hub: Hub, convert: Zygote) -> Path:
    """A run that uploads what it made, as the last thing it does."""
    folder = tmp_path_factory.mktemp("published") / "p"
    upload = {"repo": REPO, "create": True, "private": True, "license": "mit", "base_model": "owner/base"}
    validation = settings()["validation"] | {"gates": {"max_kl": 50.0}}
    yaml = project(folder, targets=[dict(target) for target in CHOSEN], upload=upload, validation=validation)
    (folder / "model" / "README.md").write_text("---\nlanguage: en\n---\n# The source's own card\n")
    result = convert.run("run", yaml, "--upload")
    assert result.returncode == 0, result.stderr
    assert [line for line in result.stdout.splitlines() if "/commit/" in line] != []
    return folder


def test_a_run_uploads_every_artifact_with_its_card(published: Path, hub: Hub) -> None:
    for target in CHOSEN:
        folder, name = published / "output" / target["name"], f"someone/tiny-{target['name']}"
        files = hub.files(name)
        assert hub.repos[name].private and list(hub.repos[name].branches) == ["main"]
        card = ModelCard(files.pop("README.md").decode())
        assert card.data.license == "mit" and card.data.base_model == "owner/base" and card.data.language == "en"
        assert "| `max_kl` | 50.0 |" in card.text
        del files[".gitattributes"]
        assert files == {path.name: path.read_bytes() for path in folder.iterdir()}
        # The source's own card goes along under another name, and is in the ledger.
        assert files["README.source.md"].endswith(b"# The source's own card\n")


def test_what_is_downloaded_is_a_whole_artifact(published: Path, hub: Hub, tmp_path: Path) -> None:
    for name, content in hub.files("someone/tiny-gptq").items():
        (tmp_path / name).write_bytes(content)
    Artifact(tmp_path).check()


def test_uploading_again_changes_nothing(published: Path, hub: Hub, convert: Zygote) -> None:
    before = {name: dict(repo.branches) for name, repo in hub.repos.items()}
    result = convert.run("upload", published / "pipeline.yaml", "--json")
    assert result.returncode == 0, result.stderr
    assert len(json.loads(result.stdout)) == 3 and result.stderr.count("holds these files already") == 3
    assert "Traceback" not in result.stderr and "%|" not in result.stderr
    assert {name: dict(repo.branches) for name, repo in hub.repos.items()} == before


def test_a_dry_run_shows_the_card_and_sends_nothing(published: Path, hub: Hub) -> None:
    hub.requests.clear()
    result = invoke("upload", published / "output" / "gptq", "--repo", "new/one", "--dry-run", "--json")
    (shown,) = json.loads(result.output)
    assert shown["repo"] == "new/one" and shown["files"]["README.md"]["bytes"] == len(shown["card"].encode())
    assert '"new/one"' in shown["card"] and hub.requests == []
    text = invoke("upload", published / "output" / "gptq", "--repo", "new/one", "--dry-run").output
    assert "model.safetensors: " in text and shown["card"] in text


def test_a_run_that_could_not_upload_ends_before_it_starts(tmp_path: Path) -> None:
    yaml = project(tmp_path / "p", validation=None)
    result = invoke("run", yaml, "--upload")
    assert result.exit_code == 2
    assert "upload: this key is required to upload, and missing" in result.output
    assert "validation: only what was validated is uploaded" in result.output
    assert not (tmp_path / "p" / "output").exists()
    write_yaml(tmp_path / "p", settings(upload={"repo": "a/b"}))
    assert "3 artifacts (gptq, awq, tiny) need a repository each" in invoke("run", yaml, "--upload").output
    write_yaml(tmp_path / "p", settings(upload={"repo": "no owner"}))
    assert "upload.repo: expected owner/name" in invoke("run", yaml).output


# ---- the snippets of the cards, run as they stand there


def blocks(hub: Hub, repo: str) -> dict[str, str]:
    text = hub.files(repo)["README.md"].decode()
    return dict(re.findall(r"\n([^\n(]+) \([^\n]*\):\n\n```python\n(.*?)```", text, flags=re.S))


def execute(code: str, online: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT, env=online, cwd=folder
    )


def test_the_snippets_that_need_no_engine_run(
    published: Path, hub: Hub, online: dict[str, str], tmp_path: Path
) -> None:
    found = {name: blocks(hub, f"someone/{name}") for name in UPLOADED}
    codes = [of["Anything that reads a plain checkpoint"] for of in found.values()]
    assert found["tiny-phone"].keys() == {"ONNX Runtime on a CPU", "Anything that reads a plain checkpoint"}
    codes += [found["tiny-tiny"]["transformers"], found["tiny-phone"]["ONNX Runtime on a CPU"]]
    # In one process, for the sake of the seconds that imports take.
    result = execute("\n".join(codes), online, tmp_path)
    assert result.returncode == 0, result.stderr
    assert all((tmp_path / f"{name}-bfloat16" / "model.safetensors").is_file() for name in UPLOADED)
    assert [len(text) > len("\n") for text in result.stdout.split("The sea")] == [False, True, True]


@pytest.fixture(scope="module")
def phone(published: Path) -> Path:
    """The folder of a phone artifact that its run has uploaded."""
    return published / "output" / "phone"


def test_a_phones_graphs_are_published_with_what_they_themselves_lose(phone: Path, hub: Hub) -> None:
    files = hub.files("someone/tiny-phone")
    card = ModelCard(files.pop("README.md").decode())
    del files[".gitattributes"]
    assert files == {path.name: path.read_bytes() for path in phone.iterdir()}
    assert {"prefill.onnx", "decode.onnx", "model.data", "manifest.json", "README.source.md"} <= files.keys()
    assert (card.data.base_model, card.data["base_model_relation"]) == ("owner/base", "quantized")
    assert {"phone", "8-bit", "onnx"} <= set(card.data.tags or ()) and card.data.license == "mit"
    assert card.data.library_name == "onnx"
    (report,) = (t for t in json.loads((phone.parent / "report.json").read_text())["targets"] if t["format"] == "phone")
    results = {result.metric_type: result.metric_value for result in card.data.eval_results or []}
    assert results["kl"] == report["engine"]["kl"] != report["kl"]
    for part in (
        f"| {report['engine']['snr_db']:.1f} dB |",
        f"on {report['engine']['tokens']} of them.",
        "* The caches hold 64 positions: no text is longer; prompts go through in chunks of 16 tokens",
        "* Run by ONNX Runtime on a CPU, and on no phone",
    ):
        assert part in card.text, part


def test_a_phones_artifact_goes_up_under_the_same_conditions(phone: Path, tmp_path: Path) -> None:
    folder = ledger(shutil.copytree(phone, tmp_path / "phone"), lambda content: content.update(validation=None))
    result = invoke("upload", folder, "--repo", "a/b")
    assert result.exit_code == 2 and "was never validated" in result.output
    (folder / "model.data").write_bytes((folder / "model.data").read_bytes()[:-1])
    result = invoke("upload", folder, "--repo", "a/b")
    assert result.exit_code == 2 and "model.data: its bytes are not those that were written" in result.output


def test_refusals_of_several_artifacts_come_together(copy: Copy) -> None:
    folder = copy()
    for name in ("gptq", "awq"):
        ledger(folder / "output" / name, lambda content: content.update(validation=None))
    result = invoke("upload", folder / "pipeline.yaml", "--repo", "a/b-{target}")
    assert result.exit_code == 2 and result.output.count("was never validated") == 2
