"""report.html: strict HTML that needs nothing else, with every figure, and a page that works in a browser."""

from __future__ import annotations

import json
import re
import shutil
import xml.dom.minidom
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import html5lib
import pytest
import torch

from calibrate.text import Windows
from tests.helpers import tokens
from tests.validate.test_report import ENGINE, RAN, SCORES
from tests.workshop import Workshop, spec
from validate.entry import entries_of
from validate.measure import Measurement, Settings
from validate.page import to_page
from validate.pictures import INK, layer_errors, to_svg, trend
from validate.place import compare_with_history
from validate.report import Run, to_report

EVIL = "<script>alert('x')</script> & \"quotes\""
DIVERGENCE = {
    "prompt": 1,
    "step": 1,
    "reference_token": 5,
    "token": 6,
    "margin": 0.125,
    "kind": "near-tie",
    "because": "resolution",
    "resolution": 0.0625,
    "margin_fp32": 0.1,
    "artifact_margin_fp32": 0.2,
    "noise": 0.3,
}
TEXTS = {
    "prompts": ["Call me", EVIL],
    "reference": [[" Ish", "mael", "."], [" <b>", " say", "\n"]],
    "artifact": [[" Ish", "mael", "."], [" <b>", " have", "\n"]],
}
REFUSED = {"name": "gptqmodel", "version": "7.7", "gap": None, "failed": EVIL, "lacking": False}
OTHERS = [
    {"name": "llama.cpp Q4_0", "format": "gguf", "skipped": "libgguf is not installed"},
    {
        "name": "llama.cpp Q4_K_M",
        "format": "gguf",
        **{"bits_per_weight": 4.8, "perplexity": 11.0, "perplexity_se": 0.1, "perplexity_ratio": 1.1},
        **{"perplexity_ratio_se": 0.01, "kl": 0.1, "top1": 0.9, "snr_db": 12.0},
    },
]


@pytest.fixture(scope="module")
def artifacts(workshop: Workshop) -> list[Any]:
    return [workshop.built("spark2_5", spec(format)).artifact for format in ("gptq", "tinygemm")]


@pytest.fixture(scope="module")
def report(artifacts: list[Any]) -> dict[str, Any]:
    greedy = {"identical": 1, "of": 2, "tokens": 3, "divergences": [DIVERGENCE]}
    gates = {"max_kl": 0.05, "min_top1": 0.5, "no_worse_than": "last"}
    settings = Settings(Windows(tokens(2, 32), 2, "ab"), tokens(2, 8), 3, 2, gates, torch.bfloat16)
    measured = Measurement(SCORES, greedy, ENGINE, [RAN, REFUSED], TEXTS)
    broken = replace(SCORES, perplexity=float("inf"), perplexity_ratio=float("nan"))
    pairs = [(artifacts[0], measured), (artifacts[1], Measurement(broken, greedy, ENGINE, [], TEXTS))]
    run = Run.begin({"model.safetensors": "ab" * 32}, [f"a warning {EVIL}"])
    return compare_with_history(to_report(EVIL, settings, pairs, 1.25, run), [], "last") | {"positioning": OTHERS}


@pytest.fixture(scope="module")
def page(report: dict[str, Any], artifacts: list[Any]) -> str:
    earlier = [replace(entry, run=f"2026-01-0{day}-x") for day in (1, 2, 3) for entry in entries_of(report)]
    return to_page(report, artifacts, earlier)


def texts(page: str, tag: str) -> list[str]:
    """What stands in each element of a tag."""
    document = html5lib.parse(page, namespaceHTMLElements=False)
    return [" ".join(" ".join(element.itertext()).split()) for element in document.iter(tag)]


def test_the_page_is_strict_html(page: str) -> None:
    html5lib.HTMLParser(strict=True).parse(page)
    assert page.startswith("<!DOCTYPE html>")


def test_nothing_is_loaded_from_anywhere(page: str) -> None:
    document = html5lib.parse(page, namespaceHTMLElements=False)
    for element in document.iter():
        for name, value in element.attrib.items():
            if str(name).rpartition("}")[2] in ("href", "src", "srcset", "data", "action"):
                assert str(value).startswith("#"), (element.tag, name, value)
    assert not [tag for tag in ("link", "img", "iframe", "object", "embed") if list(document.iter(tag))]
    assert not re.search(r"@import|url\((?!#)", page)
    assert "default-src 'none'" in page


def test_text_from_outside_is_text(page: str) -> None:
    # The script of the page itself, and no other.
    assert len(texts(page, "script")) == 1 and "alert" not in texts(page, "script")[0]
    assert EVIL in " ".join(texts(page, "h1")) and any(EVIL in text for text in texts(page, "p"))
    assert [text for text in texts(page, "td") if EVIL in text]


def test_every_gate_engine_and_other_build_has_its_row(page: str) -> None:
    rows = texts(page, "tr")
    assert any(row.startswith("gptq gptq ") and "1.2000 ± 0.0100" in row and "failed" in row for row in rows)
    assert any(row.startswith("tinygemm tinygemm ") and "not finite" in row for row in rows)
    assert "gptq max_kl failed 0.05 0.1" in rows and "gptq min_top1 held 0.5 0.9" in rows
    no_worse = [row for row in rows if "no_worse_than" in row]
    assert len(no_worse) == 2 and all(
        "failed not measured last: the history has no earlier run" in row for row in no_worse
    )
    assert any(row.startswith("gptq runs in vllm 0.32.0 held perplexity 12.200, 1.67% ± 0.20 from") for row in rows)
    assert any(row.startswith("gptq runs in gptqmodel 7.7 failed") for row in rows)
    assert "llama.cpp Q4_0 gguf not measured: libgguf is not installed" in rows
    assert any(row.startswith("llama.cpp Q4_K_M gguf 4.800 11.000 ± 0.100 1.1000 ± 0.0100") for row in rows)


def test_continuations_stand_side_by_side_with_the_parting_marked(page: str) -> None:
    assert texts(page, "mark") == ["say", "have"] * 2
    summaries = texts(page, "summary")
    assert "identical …Call me" in summaries
    assert any(text.startswith("leaves at token 2, margin 0.125 : near-tie …") for text in summaries)


def test_the_ledger_has_a_row_for_everything(page: str, artifacts: list[Any]) -> None:
    document = html5lib.parse(page, namespaceHTMLElements=False)
    (table,) = [element for element in document.iter("table") if element.get("id") == "rows"]
    rows = [[cell.text or "" for cell in row.iter("td")] for row in table.iter("tr")][1:]
    ledgers = {artifact.ledger.target["name"]: artifact.ledger for artifact in artifacts}
    expected = {
        (name, tensor)
        for name, ledger in ledgers.items()
        for row in ledger.tensors
        for tensor in ([linear.linear for linear in row.linears] or [row.tensor])
    }
    assert {(row[0], row[1]) for row in rows} == expected and len(rows) == len(expected)
    kept = next(row for row in rows if row[1].endswith("g_proj.weight"))
    assert kept[2] == "kept" and "bf16" in kept[8]


def test_versions_and_hashes_are_all_there(page: str, artifacts: list[Any], report: dict[str, Any]) -> None:
    for artifact in artifacts:
        assert all(value in page for value in artifact.ledger.files.values())
    for value in (*report["versions"].values(), "ab" * 32, report["reference"]["windows_sha256"]):
        assert value in page


def test_pictures_take_the_pages_colour_and_are_the_same_every_time(artifacts: list[Any]) -> None:
    ledgers = {artifact.ledger.target["name"]: artifact.ledger for artifact in artifacts}
    first, again = (to_svg(layer_errors(ledgers), "Errors by layer") for _ in range(2))
    assert first == again
    root = xml.dom.minidom.parseString(first).documentElement
    assert (
        root is not None and root.getAttribute("role") == "img" and root.getAttribute("aria-label") == "Errors by layer"
    )
    assert INK not in first and "currentColor" in first
    # Black or white of its own would vanish on one of the pages.
    assert not re.search(r"(fill|stroke): #(000000|ffffff)", first)
    for kind in ("q_proj", "down_proj", "lm_head"):
        assert f">{kind}</text>" in first


def test_two_pictures_in_a_page_share_no_ids(page: str) -> None:
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)) > 10
    assert set(re.findall(r"(?:url\(|href=\"|xlink:href=\")#([^)\"]+)", page)) <= set(ids)


def test_a_trend_without_a_finite_figure_is_drawn_empty(report: dict[str, Any]) -> None:
    entries = [replace(entry, figures={**entry.figures, "perplexity_ratio": None}) for entry in entries_of(report)]
    assert "<svg" in to_svg(trend(entries), "Trend")


BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium of this machine; playwright's own would have to be downloaded."""
    executable = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if executable is None:
        pytest.skip(f"no browser is installed here (looked for {', '.join(BROWSERS)})")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as api:
        # Root has no sandbox.
        launched = api.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_a_browser_shows_the_page(browser: Any, page: str, tmp_path: Path, scheme: str, width: int) -> None:
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True)
    tab = context.new_page()
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    requests: list[str] = []
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(file.as_uri())
    assert said == [] and requests == [file.as_uri()]
    # Figures and outcomes are seen without scrolling, on a phone too.
    for place in (".summary tbody th", ".summary td:not(:empty)", ".notes tbody td:nth-child(3)"):
        boxes = [element.bounding_box() for element in tab.locator(place).all()]
        assert boxes and all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes), place
    # Wide tables scroll inside the page, the page itself does not.
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.locator("table").count() >= 5 and tab.locator("figure svg").count() == 3
    for index in range(3):
        box = tab.locator("figure svg").nth(index).bounding_box()
        assert box["width"] > 300 and box["height"] > 150
    assert tab.evaluate(CONTRAST, "body") > 7
    for place in ("figure svg text", ".bad", ".good", ".soft", "td", "mark"):
        assert tab.evaluate(CONTRAST, place) > 4.4, place
    rows = tab.locator("#rows tbody tr:visible")
    everything = rows.count()
    tab.locator("#search").fill("TINYGEMM down_proj")
    shown = rows.count()
    assert 0 < shown < everything and tab.locator("#count").inner_text() == f"{shown} of {everything} rows"
    assert all("down_proj" in row and "tinygemm" in row for row in rows.all_inner_texts())
    tab.locator("#search").fill("no such thing")
    assert rows.count() == 0
    context.close()


# The contrast of an element's colour (or fill) with the page behind it, as WCAG defines it.
CONTRAST = """
selector => {
  const light = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(v => v / 255)
      .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const element = document.querySelector(selector), style = getComputedStyle(element);
  const svg = element.ownerSVGElement ? style.fill : style.color;
  let behind = element;
  while (/rgba\\(.*, 0\\)|transparent/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
  const [a, b] = [svg, getComputedStyle(behind).backgroundColor].map(light).sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}
"""


def test_the_report_goes_through_json(report: dict[str, Any], artifacts: list[Any]) -> None:
    assert to_page(json.loads(json.dumps(report)), artifacts) == to_page(report, artifacts)
