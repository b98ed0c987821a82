"""``convert upload``: validated artifacts to the hub, each whole and with its card, or not at all."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.utils import disable_progress_bars

from convert.card import Origin, model_card
from convert.config import Pipeline
from convert.hub import MAIN, Package, Place, check_repo_id, connect, publish
from convert.yaml_lines import suggestion
from export.artifact import CARD, is_artifact
from export.ledger import FILE as LEDGER
from export.opened import AnyArtifact, open_artifact
from models.errors import BadInput, ConvertError, GateFailed
from models.files import sha256
from validate.entry import digest
from validate.gates import failures

TARGET = "{target}"


@dataclass(frozen=True)
class Parcel:
    """One artifact, ready to go."""

    artifact: AnyArtifact
    place: Place
    package: Package
    card: str


def parcels(folders: Sequence[Path], place: Place, origin: Origin) -> list[Parcel]:
    """Checks artifacts, and writes their cards.

    Args:
        folders: of artifacts.
        place: ``{target}`` in its repository stands for an artifact's name.

    Raises:
        BadInput: for a damaged artifact, one without a validation of these bytes, and for a repository that is none.
        GateFailed: for an artifact that did not hold a gate.
    """
    _check_repo(place, [folder.name for folder in folders])
    found: list[Parcel] = []
    problems: list[ConvertError] = []
    for folder in folders:
        try:
            found.append(_parcel(folder, place, origin))
        except ConvertError as error:
            problems.append(error)
    if problems:
        # A gate that failed is what a job waits for; anything else is a mistake.
        kind = GateFailed if all(isinstance(error, GateFailed) for error in problems) else BadInput
        raise kind(dict.fromkeys(problem for error in problems for problem in error.problems))
    return found


def _check_repo(place: Place, names: Sequence[str]) -> None:
    """Raises BadInput for a name that is none of a repository, or one repository for several artifacts."""
    check_repo_id(place.repo.replace(TARGET, "target"))
    if len(names) > 1 and TARGET not in place.repo:
        raise BadInput(
            f"--repo {place.repo}: {len(names)} artifacts ({', '.join(names)}) need a repository each: put {TARGET}"
            " into the name, or choose one with --only"
        )


def _parcel(folder: Path, place: Place, origin: Origin) -> Parcel:
    artifact = open_artifact(folder)
    artifact.check()
    check_validation(artifact)
    repo = place.repo.replace(TARGET, str(artifact.ledger.target["name"]))
    card = str(model_card(artifact, repo, origin))
    files: dict[str, Path | bytes] = {name: folder / name for name in (*artifact.ledger.files, LEDGER)}
    files[CARD] = card.encode()
    # The ledger's own hashes where it has one: a file that changes from now on is seen when it is read back.
    hashes = dict(artifact.ledger.files)
    hashes[LEDGER] = sha256(folder / LEDGER)
    hashes[CARD] = hashlib.sha256(card.encode()).hexdigest()
    source = str(artifact.ledger.source["name"]).rpartition("/")[2]
    title = f"{artifact.ledger.target['name']} build of {source}, by edge-convert"
    return Parcel(
        artifact, Place(repo, place.revision, place.create, place.private), Package(files, hashes, title), card
    )


def check_validation(artifact: AnyArtifact) -> None:
    """Raises unless the artifact was validated as it is now, and held its gates.

    Raises:
        BadInput: when it was never validated, before its bytes changed, or without a result.
        GateFailed: naming each gate that failed.
    """
    folder, ledger = artifact.folder, artifact.ledger
    again = "`convert run` and `convert validate` of its pipeline validate it"
    if CARD in ledger.files:
        raise BadInput(f"{folder}: written by an older edge-convert, with a {CARD} of the source; convert it again")
    report = (ledger.validation or {}).get("report")
    if not report:
        raise BadInput(f"{folder}: was never validated; {again}")
    if report.get("artifact_sha256") != digest(ledger.files):
        raise BadInput(f"{folder}: its validation is older than its bytes; {again}")
    failed = failures(report)
    if failed:
        raise GateFailed(f"{folder}: {line}" for line in failed)
    if report["perplexity"] is None or report["perplexity_ratio"] is None:
        raise GateFailed(f"{folder}: its perplexity is not finite")


def destination(pipeline: Pipeline | None, options: Mapping[str, Any]) -> tuple[Place, Origin]:
    """Where to, and what is said of the source: a pipeline's ``upload``, under what the options say.

    Raises BadInput when neither names a repository.
    """
    section = pipeline.upload if pipeline is not None else None
    values = section.model_dump() if section is not None else {}
    values |= {key: value for key, value in options.items() if value}
    if not values.get("repo"):
        where = "" if pipeline is None else f", and {pipeline.path} has no `upload:`"
        raise BadInput(f"--repo: expected owner/name{where}")
    place = Place(
        values["repo"],
        values.get("revision") or MAIN,
        bool(values.get("create")),
        bool(values.get("private")),
    )
    return place, Origin(values.get("base_model"), values.get("license"))


def artifact_folders(path: Path, pipeline: Pipeline | None, only: Sequence[str]) -> list[Path]:
    """The artifacts that a path stands for: an artifact's folder, or all targets of a pipeline.

    Raises:
        BadInput: when there is no artifact, and for a name in ``only`` that is no target.
    """
    if pipeline is None:
        if not (path / LEDGER).is_file():
            raise BadInput(f"{path}: expected an artifact (a folder with {LEDGER}) or a pipeline.yaml")
        if only:
            raise BadInput("--only: goes with a pipeline.yaml")
        return [path]
    names = [target.name for target in pipeline.targets]
    problems = [f"--only {name}: no such target{suggestion(name, names)}" for name in only if name not in names]
    folders = [pipeline.output_folder / name for name in names if not only or name in only]
    problems += [
        f"{folder}: no artifact there; `convert run` writes it" for folder in folders if not is_artifact(folder)
    ]
    if problems:
        raise BadInput(problems)
    return folders


def check_before_run(pipeline: Pipeline, only: Sequence[str]) -> None:
    """Finds before hours of work what would keep their result from being uploaded.

    Raises:
        BadInput: without ``upload`` or ``validation``, or for a repository's name that does not do.
        EnvironmentProblem: without a token.
    """
    problems = []
    if pipeline.upload is None:
        problems.append(f"{pipeline.path}: upload: this key is required to upload, and missing")
    if pipeline.validation is None:
        problems.append(f"{pipeline.path}: validation: only what was validated is uploaded, and this key is missing")
    if problems:
        raise BadInput(problems)
    place, _ = destination(pipeline, {})
    names = [target.name for target in pipeline.targets if not only or target.name in only]
    _check_repo(place, names)
    connect()


def describe(parcel: Parcel) -> dict[str, Any]:
    """What an upload would do, for `--dry-run`."""
    sizes = {
        name: len(content) if isinstance(content, bytes) else content.stat().st_size
        for name, content in parcel.package.files.items()
    }
    lines = [f"{parcel.place.repo} ({parcel.place.revision}):"]
    lines += [f"  {name}: {size:,} bytes, SHA-256 {parcel.package.sha256[name]}" for name, size in sizes.items()]
    return {
        "target": parcel.artifact.ledger.target["name"],
        "repo": parcel.place.repo,
        "revision": parcel.place.revision,
        "files": {name: {"bytes": size, "sha256": parcel.package.sha256[name]} for name, size in sizes.items()},
        "card": parcel.card,
        "text": "\n".join([*lines, "", parcel.card]),
    }


def upload(found: Sequence[Parcel], say: Callable[[str], None]) -> list[str]:
    """Uploads parcels one after another; returns the addresses of their commits.

    Raises:
        BadInput, EnvironmentProblem: see `hub.publish`; what went before stays where it is.
    """
    if not sys.stderr.isatty():
        disable_progress_bars()
    api = connect()
    addresses = []
    for parcel in found:
        with tempfile.TemporaryDirectory(prefix="convert-") as scratch:
            addresses.append(publish(api, parcel.place, parcel.package, Path(scratch), say))
        say(f"{parcel.artifact.ledger.target['name']}: {addresses[-1]}")
    return addresses


def upload_pipeline(pipeline: Pipeline, only: Sequence[str], say: Callable[[str], None]) -> list[str]:
    """Uploads a pipeline's artifacts as its ``upload`` says; see `upload`."""
    place, origin = destination(pipeline, {})
    return upload(parcels(artifact_folders(pipeline.path, pipeline, only), place, origin), say)
