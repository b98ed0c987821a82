"""The tokenizer beside a checkpoint, and the code that it must not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.checkpoint import Folder
from models.errors import BadInput
from models.tokenizer import load_tokenizer
from tests.helpers import TEXT, tiny_checkpoint

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path(__file__)
(Path({ran!r}) / "{name}").touch()
class Own(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path / "model")


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def with_code(folder: Path, ran: Path) -> None:
    """Code for the tokenizer and, in the model's config, for the configuration; each leaves a file where it ran."""
    ran.mkdir()
    for name in ("tokenization_own", "configuration_own"):
        (folder / f"{name}.py").write_text(CODE.format(ran=str(ran), name=name))
    change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "tokenization_own.Own"]})
    change(folder / "config.json", auto_map={"AutoConfig": "configuration_own.Own"})


def test_the_tokenizer_of_the_folder_is_loaded(folder: Path) -> None:
    tokenizer = load_tokenizer(Folder(folder))
    text = TEXT.read_text(encoding="utf-8")[:2000]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) < len(text) and tokenizer.decode(ids) == text
    assert len(tokenizer) == 512


def test_a_checkpoint_without_a_tokenizer_is_refused(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(BadInput, match="^org/model: expected a tokenizer .one of tokenizer.json, .*found none"):
        load_tokenizer(Folder(folder, name="org/model"))


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "[]", "null"])
def test_a_damaged_tokenizer_ends_in_a_message(folder: Path, file: str, content: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(BadInput, match="tokenizer"):
        load_tokenizer(Folder(folder))


def test_remote_code_is_refused_and_named(folder: Path, tmp_path: Path) -> None:
    with_code(folder, tmp_path / "ran")
    with pytest.raises(BadInput) as error:
        load_tokenizer(Folder(folder, name="org/model"), allowed_code=("other",))
    assert error.value.problems == [
        "org/model: the tokenizer runs its own code from tokenization_own.py; allow it by name:"
        " `model: {trust_remote_code: [tokenization_own]}`"
    ]
    assert list((tmp_path / "ran").iterdir()) == []


def test_only_the_code_that_was_allowed_by_name_runs(folder: Path, tmp_path: Path) -> None:
    with_code(folder, tmp_path / "ran")
    tokenizer = load_tokenizer(Folder(folder), allowed_code=("tokenization_own",))
    assert type(tokenizer).__name__ == "Own" and len(tokenizer("Call me Ishmael")["input_ids"]) > 3
    assert [path.name for path in (tmp_path / "ran").iterdir()] == ["tokenization_own"]


def test_a_models_auto_map_does_not_run_for_an_ordinary_tokenizer(folder: Path, tmp_path: Path) -> None:
    with_code(folder, tmp_path / "ran")
    change(folder / "tokenizer_config.json", auto_map={})
    assert len(load_tokenizer(Folder(folder))) == 512
    assert list((tmp_path / "ran").iterdir()) == []


@pytest.mark.parametrize(
    "auto_map", [[None, "a.B"], {"AutoTokenizer": "org/repo--a.B"}, {"AutoTokenizer": ["a.B", None]}]
)
def test_every_form_of_an_auto_map_is_seen(folder: Path, auto_map: Any) -> None:
    change(folder / "tokenizer_config.json", auto_map=auto_map)
    with pytest.raises(BadInput, match=r"runs its own code from a.py; allow it by name"):
        load_tokenizer(Folder(folder))
