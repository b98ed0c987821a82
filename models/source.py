"""What a user may name as a model: a folder, a hub id, a ``.gguf`` file or ``package:NAME[/FILE.gguf]``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from models.checkpoint import WEIGHT_SUFFIXES, Checkpoint, Folder, is_pickled, pickled_message
from models.errors import BadInput, EnvironmentProblem

PACKAGE = "package:"
HUB_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*", "NOTICE*", "*.tiktoken"]


def open_source(
    source: str,
    *,
    base: Path,
    side_folder: Path,
    revision: str | None = None,
    allow_pickle: tuple[str, ...] = (),
    allow_code: tuple[str, ...] = (),
) -> Checkpoint:
    """Opens a source without reading weights.

    Args:
        source: as in ``model.source``.
        base: relative paths start here (the yaml's folder).
        side_folder: where a GGUF's tokenizer is written.
        revision: commit, tag or branch, for a hub id.
        allow_pickle: names of pickled weight files that may be read.
        allow_code: names of the Python modules that a hub id's tokenizer may bring; without it none are downloaded.

    Raises:
        BadInput: when the source cannot be found or is damaged.
        EnvironmentProblem: when a hub id cannot be reached and is not cached.
    """
    if source.startswith(PACKAGE):
        from models.gguf import GgufFile

        return GgufFile(_package_file(source), side_folder, name=source)
    path = base / Path(source).expanduser()
    if source.endswith(".gguf"):
        from models.gguf import GgufFile

        return GgufFile(path, side_folder, name=source)
    if path.exists() or source.startswith((".", "/", "~")):
        return Folder(path, name=source, allow_pickle=allow_pickle)
    allowed = (*allow_pickle, *(f"{module}.py" for module in allow_code))
    folder = _snapshot(source, revision, allowed)
    if not any(file.suffix == ".safetensors" or file.name in allow_pickle for file in folder.iterdir()):
        _refuse_other_weights(source, revision)
    return Folder(folder, name=source, allow_pickle=allow_pickle)


def _package_file(source: str) -> Path:
    package, _, file = source.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise EnvironmentProblem(f"{source}: no installed Python package {package!r}; install the one that ships it")
    found = sorted(p for folder in spec.submodule_search_locations for p in Path(folder).rglob("*.gguf"))
    if file:
        found = [p for p in found if p.name == file]
    if len(found) != 1:
        names = ", ".join(p.name for p in found) or "none"
        raise BadInput(f"{source}: expected one GGUF file in the package, found {names}")
    return found[0]


def _snapshot(source: str, revision: str | None, allowed: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=[*HUB_PATTERNS, *allowed]))
    except HFValidationError as error:
        raise BadInput(f"{source}: neither a folder nor a hub id ({error})") from error
    except LocalEntryNotFoundError as error:
        raise EnvironmentProblem(
            f"{source}: there is no such folder, and the hub has not been reached (HF_HUB_OFFLINE set, or no network)"
        ) from error
    except HfHubHTTPError as error:
        raise BadInput(f"{source}: the hub answered {error}") from error


def _refuse_other_weights(source: str, revision: str | None) -> None:
    """Says what a repository has instead of safetensors, as its other weights were not downloaded.

    Raises:
        BadInput: unless the hub cannot be asked, where all that is known is that the local copy has none.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled

    try:
        names = [name for name in HfApi().list_repo_files(source, revision=revision) if "/" not in name]
    except (HfHubHTTPError, HTTPError, OfflineModeIsEnabled):
        return
    expected = f"{source}: expected safetensors in the hub's repository"
    if pickled := [name for name in names if is_pickled(name)]:
        raise BadInput(pickled_message(expected, pickled))
    others = ", ".join(name for name in names if name.endswith(WEIGHT_SUFFIXES)) or "no weights"
    raise BadInput(f"{expected}, found {others}")
