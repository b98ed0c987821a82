"""Uploads through the unmodified client to a hub on loopback: whole and verified, or the branch is as it was."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_none

from convert.hub import Package, Place, _is_transient, _wait, check_repo_id, connect, publish
from models.errors import BadInput, EnvironmentProblem
from tests.hub_server import TOKEN, Fault, Hub, serve

REPO = "someone/model-gptq"
FILES = {
    "model.safetensors": b"weights" * 1000,
    "config.json": b"{}\n",
    "tokenizer.json": b"{...}",
    "conversion.json": b"{}",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    # The client's other way to upload needs a storage of another protocol.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    # huggingface_hub's own waits.
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with serve() as hub:
        yield hub


def package(folder: Path, files: dict[str, bytes] | None = None) -> Package:
    files = FILES if files is None else files
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    contents: dict[str, Path | bytes] = {name: folder / name for name in files}
    contents["README.md"] = b"---\nlicense: mit\n---\n# A card\n"
    hashes = {k: hashlib.sha256(v if isinstance(v, bytes) else v.read_bytes()).hexdigest() for k, v in contents.items()}
    return Package(contents, hashes, "Upload of an artifact")


def upload(hub: Hub, folder: Path, files: dict[str, bytes] | None = None, **place: bool | str) -> tuple[str, list[str]]:
    said: list[str] = []
    retry = Retrying(
        retry=retry_if_exception(_is_transient), stop=stop_after_attempt(3), wait=wait_none(), reraise=True
    )
    (folder / "scratch").mkdir(exist_ok=True)
    where = Place(REPO, **place)  # type: ignore[arg-type]
    return publish(
        connect(hub.url), where, package(folder / "files", files), folder / "scratch", said.append, retry
    ), said


def test_an_upload_is_one_commit_of_whole_files_and_leaves_no_branch(hub: Hub, tmp_path: Path) -> None:
    url, _ = upload(hub, tmp_path, create=True, private=True)
    repo = hub.repos[REPO]
    assert repo.private and list(repo.branches) == ["main"]
    assert hub.files(REPO) == {
        **FILES,
        "README.md": b"---\nlicense: mit\n---\n# A card\n",
        ".gitattributes": b"*.safetensors lfs",
    }
    assert url == f"{hub.url}/{REPO}/commit/{repo.branches['main']}"
    tree = repo.tree("main")
    assert tree is not None and tree["model.safetensors"][0] == "lfs" and tree["config.json"][0] == "regular"
    assert list((tmp_path / "scratch").rglob("*.safetensors")) == []
    commits = [request for request in hub.requests if request.startswith("POST") and request.endswith("/commit/main")]
    assert len(commits) == 1


def test_the_bytes_travel_once(hub: Hub, tmp_path: Path) -> None:
    upload(hub, tmp_path, create=True)
    assert len([request for request in hub.requests if request.startswith("PUT /objects/")]) == 1
    upload(hub, tmp_path, {**FILES, "config.json": b"{2}"})
    assert len([request for request in hub.requests if request.startswith("PUT /objects/")]) == 1
    assert hub.files(REPO)["config.json"] == b"{2}"


def test_the_same_files_again_make_no_commit_but_are_read_back(hub: Hub, tmp_path: Path) -> None:
    first, _ = upload(hub, tmp_path, create=True)
    hub.requests.clear()
    again, said = upload(hub, tmp_path)
    assert again == first and "holds these files already" in said[0]
    assert not [request for request in hub.requests if request.startswith(("PUT", "DELETE")) or "/commit/" in request]
    assert [request for request in hub.requests if request.startswith("GET") and request.endswith("model.safetensors")]


def test_what_an_earlier_artifact_had_and_this_one_lacks_is_deleted(hub: Hub, tmp_path: Path) -> None:
    ledger = b'{"files": {"old.json": "", "model-00001-of-00002.safetensors": ""}}'
    old = {"old.json": b"1", "model-00001-of-00002.safetensors": b"2", "conversion.json": ledger, "notes.md": b"mine"}
    hub.add(REPO, old)
    upload(hub, tmp_path)
    assert hub.files(REPO).keys() == {*FILES, "README.md", "notes.md"}


def test_weights_of_somebody_else_are_not_touched(hub: Hub, tmp_path: Path) -> None:
    hub.add(REPO, {"pytorch_model.bin": b"theirs", "config.json": b"theirs"})
    with pytest.raises(BadInput, match=r"holds weights that no artifact brought \(pytorch_model.bin\)"):
        upload(hub, tmp_path)
    assert hub.files(REPO) == {"pytorch_model.bin": b"theirs", "config.json": b"theirs"}
    assert list(hub.repos[REPO].branches) == ["main"]


TRANSIENT = [
    Fault("GET", f"/api/models/{REPO}$", 500),
    Fault("POST", "/api/repos/create", 503),
    Fault("POST", "/branch/", 429, headers={"Retry-After": "0"}),
    Fault("POST", "/preupload/", 429),
    Fault("POST", "/objects/batch", 500),
    Fault("PUT", "/objects/", 500),
    Fault("PUT", "/objects/", "cut"),
    Fault("POST", "/validate-yaml", "cut"),
    Fault("POST", "/commit/edge-convert", 500),
    Fault("POST", "/commit/edge-convert", "lost"),
    Fault("HEAD", "/resolve/", 502),
    Fault("GET", "/resolve/", "cut"),
    Fault("POST", "/paths-info/", 500),
    Fault("POST", "/commit/main", 429),
    Fault("POST", "/commit/main", 500, 2),
    Fault("POST", "/commit/main", "cut"),
    Fault("POST", "/commit/main", "lost"),
    Fault("DELETE", "/branch/", 503),
]


@pytest.mark.parametrize("fault", TRANSIENT, ids=lambda fault: f"{fault.method} {fault.pattern} {fault.kind}")
def test_a_fault_that_passes_is_outlived(hub: Hub, tmp_path: Path, fault: Fault) -> None:
    hub.faults.append(Fault(**vars(fault)))
    upload(hub, tmp_path, create=True)
    assert hub.faults[0].times == 0, "the fault never happened"
    assert {**FILES}.items() <= hub.files(REPO).items()
    assert list(hub.repos[REPO].branches) == ["main"]
    # A commit whose answer was lost is not made twice.
    assert list(hub.repos[REPO].messages.values()).count("Upload of an artifact") == 2


LASTING = [
    Fault("GET", f"/api/models/{REPO}$", 500, 99),
    Fault("POST", "/preupload/", 500, 99),
    Fault("POST", "/objects/batch", 429, 99),
    Fault("PUT", "/objects/", 500, 99),
    Fault("PUT", "/objects/", "cut", 99),
    Fault("POST", "/commit/edge-convert", 500, 99),
    Fault("POST", "/commit/edge-convert", "cut", 99),
    Fault("GET", "/resolve/", 500, 99),
    Fault("POST", "/commit/main", 429, 99),
    Fault("POST", "/commit/main", 500, 99),
    Fault("POST", "/commit/main", "cut", 99),
    Fault("POST", "/commit/main", 403, 99),
]


@pytest.mark.parametrize("fault", LASTING, ids=lambda fault: f"{fault.method} {fault.pattern} {fault.kind}")
def test_a_failed_upload_leaves_the_branch_as_it_was(hub: Hub, tmp_path: Path, fault: Fault) -> None:
    before = {"README.md": b"# Before", "conversion.json": b'{"files": {}}'}
    hub.add(REPO, before)
    head = hub.repos[REPO].branches["main"]
    hub.faults.append(Fault(**vars(fault)))
    with pytest.raises(EnvironmentProblem) as caught:
        upload(hub, tmp_path)
    assert hub.repos[REPO].branches == {"main": head} and hub.files(REPO) == before
    (problem,) = caught.value.problems
    assert problem.startswith(f"{REPO}: ") and ("main is as it was" in problem or "nothing was uploaded" in problem)


def test_other_bytes_than_were_sent_never_reach_the_branch(hub: Hub, tmp_path: Path) -> None:
    hub.add(REPO, {"README.md": b"# Before"})
    hub.store = lambda content: b"X" + content[1:]
    with pytest.raises(EnvironmentProblem, match=r"model.safetensors: expected SHA-256 \w+, the hub gave back"):
        upload(hub, tmp_path)
    assert hub.files(REPO) == {"README.md": b"# Before"} and list(hub.repos[REPO].branches) == ["main"]


def test_a_branch_that_somebody_else_changed_meanwhile_is_not_overwritten(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add(REPO)
    store = hub.store

    def meanwhile(content: bytes) -> bytes:
        repo.commit("main", {"README.md": ("regular", b"theirs")}, "somebody else")
        return store(content)

    hub.store = meanwhile
    with pytest.raises(EnvironmentProblem, match="somebody else has changed main meanwhile"):
        upload(hub, tmp_path)
    assert hub.files(REPO) == {"README.md": b"theirs"}


def test_what_a_killed_upload_left_is_no_hindrance(hub: Hub, tmp_path: Path) -> None:
    repo = hub.add(REPO)
    repo.commit(f"edge-convert-{package(tmp_path / 'files').digest[:16]}", {"half": ("regular", b"")}, "killed")
    upload(hub, tmp_path)
    assert list(repo.branches) == ["main"] and "half" not in hub.files(REPO)


def test_another_branch_is_made_only_when_asked_for(hub: Hub, tmp_path: Path) -> None:
    hub.add(REPO, {"README.md": b"main's"})
    with pytest.raises(BadInput, match=f"{REPO}: no branch g64; --create makes it"):
        upload(hub, tmp_path, revision="g64")
    upload(hub, tmp_path, revision="g64", create=True)
    assert FILES.items() <= hub.files(REPO, "g64").items() and hub.files(REPO) == {"README.md": b"main's"}


def test_a_missing_repository_is_made_only_when_asked_for(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"{REPO}: no such repository, or the token may not see it; --create makes it"):
        upload(hub, tmp_path)
    assert hub.repos == {}


def test_a_public_repository_is_not_taken_for_a_private_one(hub: Hub, tmp_path: Path) -> None:
    hub.add(REPO)
    with pytest.raises(BadInput, match="the repository is public, and private was asked for"):
        upload(hub, tmp_path, private=True)
    assert hub.files(REPO) == {}


def test_a_refused_token_and_a_missing_one_are_told(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(EnvironmentProblem, match="the hub refuses the token"):
        upload(hub, tmp_path)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(EnvironmentProblem, match="no token of the hub: run `hf auth login`, or set HF_TOKEN"):
        connect(hub.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(EnvironmentProblem, match="HF_HUB_OFFLINE is set"):
        connect(hub.url)


def test_a_hub_that_is_not_there_is_told(hub: Hub, tmp_path: Path) -> None:
    hub.url = "http://127.0.0.1:9"
    with pytest.raises(EnvironmentProblem, match=f"{REPO}: the upload failed: .*refused.*nothing was uploaded"):
        upload(hub, tmp_path)


@pytest.mark.parametrize("repo", ["model", "a/b/c", "some one/model", "owner/", "owner/model.git", "a--b/..c"])
def test_a_repo_id_of_another_form_is_refused(repo: str) -> None:
    with pytest.raises(BadInput, match="expected owner/name"):
        check_repo_id(repo)
    check_repo_id("owner/name.v1-g64_x")


def test_the_wait_is_what_the_hub_asks_for(hub: Hub) -> None:
    hub.add(REPO)
    hub.faults.append(Fault("GET", "/api/models/", 429, 1, {"Retry-After": "7"}))
    waits: list[float] = []
    retry = Retrying(retry=retry_if_exception(_is_transient), wait=_wait, sleep=waits.append, reraise=True)
    assert retry(connect(hub.url).model_info, REPO).id == REPO
    assert waits == [7]


def test_the_client_is_the_published_one() -> None:
    assert Path(huggingface_hub.__file__).parent.name == "huggingface_hub"
