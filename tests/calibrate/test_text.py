"""From text to token windows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from calibrate.text import (
    NO_BOS,
    BosPolicy,
    Leading,
    Text,
    calibration_windows,
    check_vocabulary,
    cut_windows,
    evaluation_windows,
    leading_tokens,
    load_text,
    tokenise,
    with_leading,
)
from models.errors import BadInput
from tests.helpers import TEXT, tiny_tokenizer


def text_file(folder: Path, content: str, name: str = "text.txt") -> Text:
    (folder / name).write_text(content, encoding="utf-8", newline="")
    return Text("text", data_files=(str(folder / name),))


def test_the_example_text_comes_back_as_it_is(tmp_path: Path) -> None:
    found = load_text(Text("text", data_files=(str(TEXT),)), tmp_path / "cache")
    expected = TEXT.read_text(encoding="utf-8")
    assert found == expected.removesuffix("\n")


@pytest.mark.parametrize(
    "content",
    [
        "one line",
        "a\n\n\nb",
        "\n\na",
        "tab\tand  spaces \n next",
        "a\u2028b\u0085c\x0bd\x0ce\x1cf\n\u00a0g",
        "é—中\n😀",
    ],
)
def test_rows_joined_give_every_character_back(tmp_path: Path, content: str) -> None:
    assert load_text(text_file(tmp_path, content), tmp_path / "cache") == content


def test_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    assert load_text(text_file(tmp_path, "first"), tmp_path / "cache") == "first"
    assert load_text(text_file(tmp_path, "second!"), tmp_path / "cache") == "second!"


def test_columns_splits_and_several_files(tmp_path: Path) -> None:
    for name, rows in (("a.jsonl", ["one", None, "two"]), ("b.jsonl", ["three"])):
        (tmp_path / name).write_text("".join(json.dumps({"body": row, "n": 1}) + "\n" for row in rows))
    text = Text("json", data_files=(str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")), column="body")
    # A row without a text is an empty line, not the word None.
    assert load_text(text, tmp_path / "cache") == "one\n\ntwo\nthree"
    part = Text("json", data_files=(str(tmp_path / "*.jsonl"),), column="body", split="train[:1]")
    assert load_text(part, tmp_path / "cache") == "one"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"column": "body"}, r"column: expected one of \['text'\], found 'body'"),
        ({"split": "test"}, "test"),
        ({"data_files": ("/none/a.txt", "/none/b.txt")}, "(?s)found none at /none/a.txt.*found none at /none/b.txt"),
        ({"data_files": ("/none/*.txt",)}, "/none"),
        ({"path": "org/no-such-dataset", "data_files": ()}, "^dataset org/no-such-dataset"),
    ],
)
def test_what_cannot_be_read_ends_in_a_message(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    text = text_file(tmp_path, "a\nb")
    with pytest.raises(BadInput, match=message):
        load_text(Text(**{**vars(text), **changes}), tmp_path / "cache")  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ["", "\n", " \n\t\n"])
def test_an_empty_text_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadInput, match=r"^dataset text .*text.txt: .*empty"):
        load_text(text_file(tmp_path, content), tmp_path / "cache")


@pytest.mark.parametrize(
    ("length", "count", "chosen"), [(10, 4, [0, 2, 5, 7]), (10, 10, list(range(10))), (7, 4, [0, 3, 7, 11])]
)
def test_windows_are_number_i_times_total_over_count(length: int, count: int, chosen: list[int]) -> None:
    ids = torch.arange(105)
    found = cut_windows(ids, count, length, "text")
    assert found.tolist() == [list(range(i * length, (i + 1) * length)) for i in chosen]
    total = 105 // length
    assert chosen == [i * total // count for i in range(count)]


@pytest.mark.parametrize("tokens", [0, 9, 39])
def test_a_text_that_is_too_short_is_refused_with_both_sizes(tokens: int) -> None:
    expected = (
        rf"^book: expected at least 4 windows of 10 tokens \(40 tokens\), found {tokens} tokens \({tokens // 10} win"
    )
    with pytest.raises(BadInput, match=expected):
        cut_windows(torch.arange(tokens), 4, 10, "book")


def test_the_text_is_tokenised_whole_without_special_tokens() -> None:
    text = TEXT.read_text(encoding="utf-8")[:5000]
    ids = tokenise(tiny_tokenizer(), text)
    assert ids.dtype == torch.int64 and ids.min() > 2
    assert tiny_tokenizer().decode(ids) == text


def test_evaluation_windows_hold_the_tokens_that_were_asked_for() -> None:
    text = TEXT.read_text(encoding="utf-8")[:20_000]
    ids = tokenise(tiny_tokenizer(), text)
    windows = evaluation_windows(tiny_tokenizer(), text, tokens=250, length=64)
    assert windows.ids.shape == (3, 64) and windows.tokens == 192 and windows.available == len(ids) // 64
    assert windows.ids[1].tolist() == ids[windows.available // 3 * 64 :][:64].tolist()
    assert evaluation_windows(tiny_tokenizer(), text, tokens=10, length=64).ids.shape == (1, 64)
    with pytest.raises(BadInput, match="^validation text: expected at least 1000 windows"):
        evaluation_windows(tiny_tokenizer(), text, tokens=64_000, length=64)


def test_calibration_windows_are_decided_by_the_seed() -> None:
    text = TEXT.read_text(encoding="utf-8")[:20_000]
    first, again, other = (calibration_windows(tiny_tokenizer(), text, 6, 32, seed) for seed in (1, 1, 2))
    assert torch.equal(first.ids, again.ids) and first.digest() == again.digest()
    assert not torch.equal(first.ids, other.ids) and first.digest() != other.digest()
    assert first.text_sha256 == other.text_sha256
    # Different windows of the text, in its order.
    ids = tokenise(tiny_tokenizer(), text)
    every = [window.tolist() for window in ids[: len(ids) // 32 * 32].view(-1, 32)]
    places = [every.index(window.tolist()) for window in first.ids]
    assert places == sorted(set(places)) and len(places) == 6
    whole = calibration_windows(tiny_tokenizer(), text, first.available, 32, 3)
    assert whole.ids.tolist() == every
    with pytest.raises(BadInput, match="^calibration text: expected at least"):
        calibration_windows(tiny_tokenizer(), text, first.available + 1, 32, 1)


def test_a_digest_depends_on_ids_and_shape() -> None:
    text = TEXT.read_text(encoding="utf-8")[:2000]
    wide, long = (evaluation_windows(tiny_tokenizer(), text, 128, length) for length in (32, 64))
    assert wide.ids.numel() == long.ids.numel() and wide.digest() != long.digest()


def test_a_tokenizer_with_more_ids_than_the_model_is_refused() -> None:
    ids = tokenise(tiny_tokenizer(), "Call me Ishmael")
    largest = int(ids.max())
    check_vocabulary(tiny_tokenizer(), ids, largest + 1, "org/model")
    with pytest.raises(
        BadInput, match=f"^org/model: the tokenizer does not match .* below {largest} .* found {largest}$"
    ):
        check_vocabulary(tiny_tokenizer(), ids, largest, "org/model")


def bos_tokenizer() -> Any:
    """The tiny tokenizer, which puts <s> before a text and <|endoftext|> after it, as some do."""
    tokenizer = tiny_tokenizer()
    template = TemplateProcessing(single="<s> $A <|endoftext|>", special_tokens=[("<s>", 0), ("<|endoftext|>", 1)])
    tokenizer.backend_tokenizer.post_processor = template
    return tokenizer


def test_windows_begin_as_the_tokenizer_begins_a_text() -> None:
    text = TEXT.read_text(encoding="utf-8")[:20_000]
    plain, added = leading_tokens(tiny_tokenizer(), "auto"), leading_tokens(bos_tokenizer(), "auto")
    assert plain.ids == () and plain.bos == f"{NO_BOS} (this tokenizer adds no token before a text)"
    assert added.ids == (0,) and added.bos.startswith("<s> before every window; ")
    windows = evaluation_windows(bos_tokenizer(), text, 256, 64, added)
    assert windows.ids.shape == (4, 64) and windows.ids[:, 0].eq(0).all() and windows.bos == added.bos
    # The text's own tokens stand behind it, none twice, none lost at a window's end.
    ids = tokenise(tiny_tokenizer(), text)
    assert windows.available == len(ids) // 63
    assert windows.ids[1, 1:].tolist() == ids[windows.available // 4 * 63 :][:63].tolist()


def test_calibration_windows_begin_as_those_that_judge_them() -> None:
    text = TEXT.read_text(encoding="utf-8")[:20_000]
    leading = leading_tokens(bos_tokenizer(), "auto")
    windows = calibration_windows(bos_tokenizer(), text, 6, 32, 1, leading)
    assert windows.ids.shape == (6, 32) and windows.ids[:, 0].eq(0).all() and windows.bos == leading.bos
    # Behind it is the text, cut where evaluation windows are cut; what is kept of the text for comparisons has none.
    every = evaluation_windows(bos_tokenizer(), text, windows.available * 32, 32, leading).ids.tolist()
    assert all(window in every for window in windows.ids.tolist())
    assert windows.text_ids.tolist() == tokenise(bos_tokenizer(), text).tolist()
    with pytest.raises(BadInput, match="^calibration text: expected windows longer than the 1 tokens"):
        calibration_windows(bos_tokenizer(), text, 6, 1, 1, leading)


def test_the_policy_may_be_set_against_the_tokenizer() -> None:
    assert leading_tokens(bos_tokenizer(), "never") == Leading((), NO_BOS)
    assert leading_tokens(bos_tokenizer(), "always").ids == leading_tokens(tiny_tokenizer(), "always").ids == (0,)
    without = tiny_tokenizer()
    without.bos_token = None
    assert leading_tokens(without, "auto").ids == ()
    with pytest.raises(BadInput, match="bos: always: the tokenizer has no token for the beginning of a text"):
        leading_tokens(without, "always")


def test_a_window_has_room_for_text_behind_its_first_token() -> None:
    with pytest.raises(BadInput, match="expected windows longer than the 1 tokens before each, found 1"):
        with_leading(Leading((0,)), torch.arange(100), 2, 1, "greedy prompts")


@pytest.mark.parametrize("policy", ["auto", "always"])
def test_windows_hold_no_padding(policy: BosPolicy) -> None:
    """The text's tail that fills no window is left out, where padding would be scored."""
    text = TEXT.read_text(encoding="utf-8")[:5_000]
    tokenizer = bos_tokenizer()
    leading = leading_tokens(tokenizer, policy)
    for length in (7, 64, 1000):
        total = len(tokenise(tokenizer, text)) // (length - 1)
        windows = evaluation_windows(tokenizer, text, total * length, length, leading)
        assert not windows.ids.eq(tokenizer.pad_token_id).any()
        assert windows.ids[:, 1:].min() > 2 and windows.ids.shape == (total, length)
