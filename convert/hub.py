"""Puts files into a repository of the hub so that its branch shows all of them, verified, or is as it was.

The files go to a branch of their own first and are downloaded again from there. Only when every byte is back does one
commit, which copies them on the hub's side, bring them to the branch that people read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperation,
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    get_token,
    is_offline_mode,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils.sha import git_hash
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from export.ledger import FILE as LEDGER
from models.checkpoint import WEIGHT_SUFFIXES
from models.errors import BadInput, EnvironmentProblem
from models.files import environment_problem, sha256

MAIN = "main"
# Of a request that may succeed later; huggingface_hub repeats some of its calls itself, the others are repeated here.
TRANSIENT = (408, 429, 500, 502, 503, 504)
ATTEMPTS, LONGEST_WAIT = 5, 60.0
_exponential = wait_random_exponential(multiplier=1, max=20)


@dataclass(frozen=True)
class Place:
    """Where files go.

    Attributes:
        repo: ``owner/name``.
        revision: the branch.
        create: whether the repository, and the branch, may be made.
        private: of a repository that is made; one that is there already must be private.
    """

    repo: str
    revision: str = MAIN
    create: bool = False
    private: bool = False


@dataclass(frozen=True)
class Package:
    """What is uploaded.

    Attributes:
        files: path in the repository -> a file of this machine, or its content.
        sha256: of each.
        title: the commit's first line.
        description: its text.
    """

    files: Mapping[str, Path | bytes]
    sha256: Mapping[str, str]
    title: str
    description: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 over all names and contents."""
        lines = "".join(f"{value}  {name}\n" for name, value in sorted(self.sha256.items()))
        return hashlib.sha256(lines.encode()).hexdigest()


def check_repo_id(repo: str) -> None:
    """Raises BadInput for what is no ``owner/name`` of the hub."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise BadInput(f"--repo {repo}: expected owner/name: {' '.join(str(error).split())}") from error
    if repo.count("/") != 1:
        raise BadInput(f"--repo {repo}: expected owner/name, found no owner")


def connect(endpoint: str | None = None) -> HfApi:
    """The hub's client, for HF_ENDPOINT unless another one is given.

    Raises:
        EnvironmentProblem: without a token, or when the hub must not be reached.
    """
    if is_offline_mode():
        raise EnvironmentProblem("the hub must not be reached: HF_HUB_OFFLINE is set")
    if get_token() is None:
        raise EnvironmentProblem("no token of the hub: run `hf auth login`, or set HF_TOKEN")
    return HfApi(endpoint=endpoint, library_name="edge-convert")


def _is_transient(error: BaseException) -> bool:
    """Whether a call may succeed later; huggingface_hub wraps some of its errors in others."""
    found = next((e for e in _chain(error) if isinstance(e, HTTPError)), None)
    if isinstance(found, HfHubHTTPError):
        return found.response.status_code in TRANSIENT
    # Other subclasses are of the transport: timeouts, connections that are refused or cut.
    return found is not None


def _wait(state: RetryCallState) -> float:
    """What the hub asks for, else a random time that grows."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return min(float(asked), LONGEST_WAIT) if asked.isdigit() else _exponential(state)


def patient() -> Retrying:
    """Repeats a call that failed for a reason which may pass."""
    return Retrying(
        retry=retry_if_exception(_is_transient), stop=stop_after_attempt(ATTEMPTS), wait=_wait, reraise=True
    )


def publish(
    api: HfApi, place: Place, package: Package, scratch: Path, say: Callable[[str], None], retry: Retrying | None = None
) -> str:
    """Uploads a package; returns the address of the commit that shows it.

    A branch that shows the same files already is left alone, but read back all the same.

    Args:
        scratch: a folder for the files that are read back, one at a time.
        retry: how failed calls are repeated.

    Raises:
        BadInput: when the repository is not there, is not what was asked for, or holds what another program put there.
        EnvironmentProblem: when the hub refuses, cannot be reached, or gives back other bytes.
    """
    hub = _Hub(api, place, retry or patient())
    before = "nothing was uploaded"
    try:
        head = hub.open()
        before = f"{place.revision} is as it was"
        if hub.shows(head, package):
            say(f"{place.repo}: {place.revision} holds these files already")
            hub.verify(head, package, scratch, say)
            return hub.address(head)
        deletions = hub.stale(head, package, scratch)
        stage = f"edge-convert-{package.digest[:16]}"
        hub.restart(stage, head)
        try:
            added = [CommitOperationAdd(path, content) for path, content in package.files.items()]
            staged = hub.commit(stage, head, [*added, *deletions], package)
            hub.verify(staged, package, scratch, say)
            copied = [CommitOperationCopy(path, path, src_revision=staged) for path in package.files]
            found = hub.commit(place.revision, head, [*copied, *deletions], package)
        finally:
            hub.remove(stage, say)
        return hub.address(found)
    except (OSError, HTTPError, RuntimeError, ValueError, EntryNotFoundError) as error:
        # OSError: refused or cut connections; RuntimeError: what huggingface_hub wraps a failed upload in.
        raise told(error, place, before) from error


class _Hub:
    """The hub's calls, each with patience."""

    def __init__(self, api: HfApi, place: Place, retry: Retrying) -> None:
        self.api, self.place, self.repo, self.retry = api, place, place.repo, retry

    def open(self) -> str:
        """The branch's head; makes repository and branch when that was asked for."""
        try:
            info: ModelInfo = self.retry(self.api.model_info, self.repo)
        except RepositoryNotFoundError:
            if not self.place.create:
                raise
            self.retry(self.api.create_repo, self.repo, private=self.place.private or None, exist_ok=True)
            info = self.retry(self.api.model_info, self.repo)
        if self.place.private and info.private is False:
            raise BadInput(f"{self.repo}: the repository is public, and private was asked for; change it on the hub")
        try:
            head: ModelInfo = self.retry(self.api.model_info, self.repo, revision=self.place.revision)
        except RevisionNotFoundError as error:
            if not self.place.create:
                raise BadInput(f"{self.repo}: no branch {self.place.revision}; --create makes it") from error
            self.retry(self.api.create_branch, self.repo, branch=self.place.revision, exist_ok=True)
            head = self.retry(self.api.model_info, self.repo, revision=self.place.revision)
        return str(head.sha)

    def restart(self, branch: str, head: str) -> None:
        """A new branch at ``head``; one that an earlier upload left is dropped."""
        if branch in {ref.name for ref in self.retry(self.api.list_repo_refs, self.repo).branches}:
            self.retry(self.api.delete_branch, self.repo, branch=branch)
        self.retry(self.api.create_branch, self.repo, branch=branch, revision=head, exist_ok=True)

    def remove(self, branch: str, say: Callable[[str], None]) -> None:
        """Drops a branch; one that cannot be dropped does not undo what was done."""
        try:
            self.retry(self.api.delete_branch, self.repo, branch=branch)
        except (OSError, HTTPError) as error:
            say(f"{self.repo}: the branch {branch} could not be removed, and may be: {_line(error)}")

    def files(self, revision: str, paths: Iterable[str]) -> dict[str, RepoFile]:
        found = self.retry(self.api.get_paths_info, self.repo, list(paths), revision=revision)
        return {file.path: file for file in found if isinstance(file, RepoFile)}

    def shows(self, revision: str, package: Package) -> bool:
        """Whether a revision has the package's files, by the hashes that the hub states."""
        found = self.files(revision, package.files)
        return all(path in found and _same(found[path], package, path) for path in package.files)

    def stale(self, head: str, package: Package, scratch: Path) -> list[CommitOperationDelete]:
        """Deletes what an earlier artifact in the repository had and this one does not.

        Raises BadInput for weights that no artifact of ours brought: they are not ours to delete, and loaders would
        find them beside the new ones.
        """
        present = set(self.retry(self.api.list_repo_files, self.repo, revision=head))
        ours: set[str] = set()
        if LEDGER in present:
            ours = {*self.ledger_files(head, scratch), LEDGER}
        extra = present - set(package.files)
        foreign = sorted(path for path in extra - ours if path.endswith(WEIGHT_SUFFIXES))
        if foreign:
            shown = ", ".join(foreign[:3]) + (f" and {len(foreign) - 3} more" if len(foreign) > 3 else "")
            raise BadInput(f"{self.repo}: holds weights that no artifact brought ({shown}); name another --repo")
        return [CommitOperationDelete(path) for path in sorted(extra & ours)]

    def ledger_files(self, head: str, scratch: Path) -> list[str]:
        """The files of the artifact that a revision holds."""
        file = self.download(LEDGER, head, scratch)
        try:
            return list(json.loads(file.read_text(encoding="utf-8"))["files"])
        except (ValueError, KeyError, TypeError):
            # Somebody else's file of that name says nothing of what is ours.
            return []
        finally:
            file.unlink()

    def download(self, path: str, revision: str, scratch: Path) -> Path:
        """A file of a revision, from the hub and from no cache."""
        found = self.retry(
            self.api.hf_hub_download, self.repo, path, revision=revision, local_dir=scratch, force_download=True
        )
        return Path(found)

    def commit(self, branch: str, parent: str, operations: list[Any], package: Package) -> str:
        """One commit on a branch whose head is ``parent``; returns its id.

        A commit whose answer was lost on the way is recognised, not made twice.
        """
        additions = [operation for operation in operations if isinstance(operation, CommitOperationAdd)]
        if additions:
            # Repeats its requests by itself, and what it has done is not done again.
            self.api.preupload_lfs_files(self.repo, additions, revision=branch, free_memory=False)
        return str(self.retry(self._commit, branch, parent, operations, package))

    def _commit(self, branch: str, parent: str, operations: list[CommitOperation], package: Package) -> str:
        head = str(self.api.model_info(self.repo, revision=branch).sha)
        if head != parent and self.shows(head, package):
            return head
        done = self.api.create_commit(
            self.repo,
            operations,
            commit_message=package.title,
            commit_description=package.description,
            revision=branch,
            parent_commit=parent,
        )
        return str(done.oid)

    def verify(self, commit: str, package: Package, scratch: Path, say: Callable[[str], None]) -> None:
        """Downloads every file of a commit and compares its SHA-256; raises EnvironmentProblem for other bytes."""
        say(f"{self.repo}: reading {len(package.files)} files back")
        wrong = []
        for path, expected in package.sha256.items():
            file = self.download(path, commit, scratch)
            found = sha256(file)
            file.unlink()
            if found != expected:
                wrong.append(f"{path}: expected SHA-256 {expected}, the hub gave back {found}")
        if wrong:
            raise EnvironmentProblem([f"{self.repo}: {line}" for line in wrong])

    def address(self, commit: str) -> str:
        return f"{self.api.endpoint}/{self.repo}/commit/{commit}"


def _same(file: RepoFile, package: Package, path: str) -> bool:
    if file.lfs is not None:
        return file.lfs.sha256 == package.sha256[path]
    content = package.files[path]
    if isinstance(content, Path):
        # Only small files are stored outside of LFS.
        content = content.read_bytes() if content.stat().st_size == file.size else b""
    return file.blob_id == git_hash(content)


def told(error: BaseException, place: Place, before: str) -> BadInput | EnvironmentProblem:
    """A failure of the hub in words for the user.

    Args:
        before: what has become of the branch.
    """
    if (known := environment_problem(error)) is not None:
        return known
    if isinstance(error, RepositoryNotFoundError):
        hint = "" if place.create else "; --create makes it"
        return BadInput(f"{place.repo}: no such repository, or the token may not see it{hint}")
    if isinstance(error, OfflineModeIsEnabled):
        return EnvironmentProblem("the hub must not be reached: HF_HUB_OFFLINE is set")
    cause = next((e for e in _chain(error) if isinstance(e, HfHubHTTPError)), None)
    status = None if cause is None else cause.response.status_code
    if status == 401:
        return EnvironmentProblem("the hub refuses the token: run `hf auth login`, or set HF_TOKEN")
    if status == 403:
        return EnvironmentProblem(f"{place.repo}: the token may not write there; {before}")
    if status == 412:
        return EnvironmentProblem(
            f"{place.repo}: somebody else has changed {place.revision} meanwhile; {before}; repeat"
        )
    reason = _line(cause or error)
    return EnvironmentProblem(f"{place.repo}: the upload failed: {reason}; {before}; repeat it later")


def _chain(error: BaseException) -> Iterable[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text or type(error).__name__
