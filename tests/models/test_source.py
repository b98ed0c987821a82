"""What a user may name as a model."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from models.checkpoint import Checkpoint, Folder
from models.errors import BadInput, EnvironmentProblem
from models.source import HUB_PATTERNS, open_source
from tests.helpers import tiny_checkpoint
from tests.hub_server import Hub, serve

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def open_from(base: Path, source: str, **arguments: object) -> Checkpoint:
    return open_source(source, base=base, side_folder=base / "side", **arguments)  # type: ignore[arg-type]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local cache of the hub, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cached(hub: Path, repository: str, commit: str = COMMIT) -> Path:
    folder = hub / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    return folder / "snapshots" / commit


@pytest.mark.parametrize("source", ["model", "./model", "deep/../model"])
def test_a_relative_folder_starts_at_the_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Path, source: str
) -> None:
    monkeypatch.chdir("/")
    (tmp_path / "deep").mkdir()
    tiny_checkpoint(tmp_path / "model")
    checkpoint = open_from(tmp_path, source)
    assert isinstance(checkpoint, Folder) and checkpoint.name == source
    assert checkpoint.path.resolve() == tmp_path / "model" and "model.norm.weight" in checkpoint.tensors


def test_an_absolute_folder_and_one_in_the_home_ignore_where_the_yaml_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tiny_checkpoint(tmp_path / "model")
    for source in (str(tmp_path / "model"), "~/model"):
        assert "model.norm.weight" in open_from(tmp_path / "elsewhere", source).tensors


@pytest.mark.parametrize("source", ["./none", "/none", "~/none"])
def test_what_can_only_be_a_folder_is_not_looked_for_on_the_hub(tmp_path: Path, hub: Path, source: str) -> None:
    with pytest.raises(BadInput, match="none: expected a folder with config.json and safetensors, found no such"):
        open_from(tmp_path, source)


def test_a_hub_id_is_read_from_the_local_cache_when_offline(tmp_path: Path, hub: Path) -> None:
    tiny_checkpoint(cached(hub, "org/model"))
    checkpoint = open_from(tmp_path, "org/model")
    assert checkpoint.name == "org/model" and "model.norm.weight" in checkpoint.tensors
    assert {"tokenizer.json", "generation_config.json"} <= set(checkpoint.side_files())


def test_a_hub_id_with_a_revision_is_that_revision(tmp_path: Path, hub: Path) -> None:
    first, second = "1" * 40, "2" * 40
    tiny_checkpoint(cached(hub, "org/model", first), seed=1)
    tiny_checkpoint(cached(hub, "org/model", second), seed=2)
    newest, old = open_from(tmp_path, "org/model"), open_from(tmp_path, "org/model", revision=first)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(newest.read(name), old.read(name))
    assert torch.equal(old.read(name), Folder(hub / "models--org--model" / "snapshots" / first).read(name))


def test_a_folder_goes_before_a_hub_id_of_the_same_name(tmp_path: Path, hub: Path) -> None:
    tiny_checkpoint(cached(hub, "org/model"), num_hidden_layers=1)
    tiny_checkpoint(tmp_path / "org" / "model", num_hidden_layers=2)
    assert open_from(tmp_path, "org/model").config["num_hidden_layers"] == 2


def test_a_hub_id_that_is_not_cached_is_a_problem_of_the_machine_when_offline(tmp_path: Path, hub: Path) -> None:
    with pytest.raises(EnvironmentProblem, match="org/absent: there is no such folder, and the hub has not been"):
        open_from(tmp_path, "org/absent")


@pytest.fixture
def server(hub: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub on loopback."""
    with serve() as found:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        address = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield found


@pytest.mark.parametrize(
    "weights, found",
    [
        (
            ["pytorch_model.bin", "training_args.bin", "original/consolidated.00.pth"],
            "found pickled weights (pytorch_model.bin), which can run code when read; allow them by name:"
            " `model: {allow_pickle: [pytorch_model.bin]}`",
        ),
        (["tf_model.h5", "model.gguf"], "found tf_model.h5, model.gguf"),
        ([], "found no weights"),
    ],
)
def test_a_repository_without_safetensors_is_told_what_it_has_instead(
    tmp_path: Path, server: Hub, weights: list[str], found: str
) -> None:
    server.add("org/model", {"config.json": b"{}", **dict.fromkeys(weights, b"weights")})
    with pytest.raises(BadInput) as error:
        open_from(tmp_path, "org/model")
    assert error.value.problems == [f"org/model: expected safetensors in the hub's repository, {found}"]
    # Nobody wanted them, so none came.
    assert not [line for line in server.requests if "resolve" in line and not line.endswith("config.json")]


def test_without_the_hub_the_local_copy_says_what_it_has(tmp_path: Path, hub: Path) -> None:
    folder = cached(hub, "org/model")
    (folder / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="found no weights"):
        open_from(tmp_path, "org/model")
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    with pytest.raises(BadInput, match=r"found pickled weights \(pytorch_model.bin\)"):
        open_from(tmp_path, "org/model")


def test_pickled_weights_of_the_hub_are_read_when_allowed_by_name(tmp_path: Path, server: Hub) -> None:
    file = tmp_path / "weights"
    torch.save({"a": torch.ones(2)}, file)
    server.add("org/model", {"config.json": b"{}", "pytorch_model.bin": file.read_bytes()})
    found = open_from(tmp_path, "org/model", allow_pickle=("pytorch_model.bin",))
    assert torch.equal(found.read("a"), torch.ones(2))


@pytest.mark.parametrize("source", ["a/b/c", "my model", "org/mo..del"])
def test_a_name_that_is_no_hub_id_is_bad_input(tmp_path: Path, hub: Path, source: str) -> None:
    with pytest.raises(BadInput, match="neither a folder nor a hub id"):
        open_from(tmp_path, source)


def test_pickled_weights_of_a_folder_are_read_only_when_allowed_by_name(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    checkpoint = Folder(folder)
    torch.save({name: checkpoint.read(name) for name in checkpoint.tensors}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(BadInput, match=r"found pickled weights \(pytorch_model.bin\), .*allow them by name"):
        open_from(tmp_path, "model")
    allowed = open_from(tmp_path, "model", allow_pickle=("pytorch_model.bin",))
    assert dict(allowed.tensors) == dict(checkpoint.tensors)


def test_only_what_the_yaml_allows_is_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    folder = tiny_checkpoint(tmp_path / "answer")

    def snapshot_download(repository: str, **arguments: object) -> str:
        asked.append({"repository": repository, **arguments})
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    open_from(tmp_path, "org/model", revision="v1", allow_pickle=("pytorch_model.bin",), allow_code=("own",))
    allowed = [*HUB_PATTERNS, "pytorch_model.bin", "own.py"]
    assert asked == [{"repository": "org/model", "revision": "v1", "allow_patterns": allowed}]
    assert not any("py" in pattern or "bin" in pattern or pattern == "*" for pattern in HUB_PATTERNS)


def test_a_package_that_is_not_installed_is_a_problem_of_the_machine(tmp_path: Path) -> None:
    for source in ("package:no_such_package_here", "package:not-an-identifier", "package:json.decoder"):
        with pytest.raises(EnvironmentProblem, match="no installed Python package"):
            open_from(tmp_path, source)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "site" / "shipped_model"
    (folder / "data").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise SystemExit('the package was imported')")
    monkeypatch.syspath_prepend(str(folder.parent))
    yield folder
    sys.modules.pop("shipped_model", None)


def test_a_package_ships_one_gguf_or_the_source_names_it(tmp_path: Path, package: Path) -> None:
    with pytest.raises(BadInput, match="expected one GGUF file in the package, found none"):
        open_from(tmp_path, "package:shipped_model")
    for name in ("a.gguf", "data/b.gguf"):
        (package / name).write_bytes(b"GGUF")
    with pytest.raises(BadInput, match="expected one GGUF file in the package, found a.gguf, b.gguf"):
        open_from(tmp_path, "package:shipped_model")
    with pytest.raises(BadInput, match="data/b.gguf: expected a GGUF file of a model"):
        open_from(tmp_path, "package:shipped_model/b.gguf")
    with pytest.raises(BadInput, match="found none"):
        open_from(tmp_path, "package:shipped_model/c.gguf")
    shutil.rmtree(package / "data")
    with pytest.raises(BadInput, match="a.gguf: expected a GGUF file of a model"):
        open_from(tmp_path, "package:shipped_model")


def test_a_gguf_path_is_relative_to_the_yaml_too(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"{tmp_path}/model.gguf: expected a GGUF file, found no such file"):
        open_from(tmp_path, "model.gguf")
