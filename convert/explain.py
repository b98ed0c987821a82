"""``convert explain``: which layers and linears of an artifact cause its loss, and which change buys it back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from convert.against import TextChoice, opened_against
from convert.terminal import Reporter
from export.opened import open_artifact
from models.errors import BadInput
from validate.explain import Checked, explain

PICTURES = (".png", ".svg")
# Linears in the table; all of them are in the JSON.
SHOWN = 10


def explain_artifact(
    folder: Path,
    reference: str,
    text: TextChoice,
    checked: Checked,
    budget: float,
    picture: Path | None,
    show: Reporter,
) -> dict[str, Any]:
    """Ranks an artifact's parts, and draws them; see `validate.explain`.

    Args:
        picture: a file to draw into.

    Raises:
        BadInput: when the artifact or the reference is damaged or of another model, or no text can be found.
    """
    if picture is not None and picture.suffix not in PICTURES:
        raise BadInput(f"--plot {picture}: expected a name that ends with {' or '.join(PICTURES)}")
    artifact = open_artifact(folder)
    artifact.check()
    with opened_against(artifact, reference, text) as against:
        found = explain(against.model, artifact, against.settings.windows.ids, checked, budget, show)
    if picture is not None:
        from validate.explain_picture import draw

        draw(found, picture)
    return found


def print_explanation(found: Mapping[str, Any], console: Console) -> None:
    """Layers, the linears that cause most, how far the two ways to count agree, and what to write into the yaml."""
    kl, check = found["kl"], found["check"]
    title = f"{found['artifact']}: KL {kl:.4g} nats per token over {found['tokens']} tokens; what each part causes"
    table = Table("part", "restored (measured)", "of the KL", "attributed", "output error", title=title)
    head = [row for row in found["linears"] if row["restored"] is not None and not _inside(found, row["name"])]
    for row in [*found["layers"], *head]:
        table.add_row(*_row(row, kl))
    table.add_section()
    for row in [row for row in found["linears"] if _inside(found, row["name"])][:SHOWN]:
        table.add_row(*_row(row, kl))
    console.print(table)
    lines = [f"attributed in all: {check['attributed']:.4g} of {kl:.4g}"]
    if check["correlation"] is not None:
        lines[0] += (
            f"; correlation with what was measured {check['correlation']:.3f},"
            f" largest difference {check['largest_difference']:.2g}"
        )
    if found["rewritten"]:
        lines.append(f"weights were rewritten, so only whole layers compare: {', '.join(found['rewritten'])}")
    for entry in found["advice"]:
        cost = f"{entry['extra_bits_per_weight']:.3g} more bits per weight"
        how = "measured" if entry["measured"] else "estimated"
        change = ", ".join(f"{key}: {value}" for key, value in entry["change"].items())
        lines.append(f"{change}: buys back {entry['kl']:.4g} of the KL ({how}) for {cost}")
    if found["activations"] is not None:
        lines += _activations(found["activations"])
    if found["untried"]:
        lines.append(f"not estimated, for the same bits: method {', '.join(found['untried'])}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if found["advice"]:
        console.print("most for each bit:", highlight=False)
        console.print(found["advice"][0]["yaml"], highlight=False, markup=False, soft_wrap=True, end="")


def _activations(found: Mapping[str, Any]) -> list[str]:
    """What a phone's parts are not of."""
    lines = ["these are the weights' parts: what rounding of activations adds is in none of them"]
    if found["graphs_kl"] is not None:
        lines.append(
            f"when it was validated, the weights' KL was {found['weights_kl']:.4g}, and that of the graphs, which round"
            f" activations, {found['graphs_kl']:.4g} against the source in float32 ({found['engine']},"
            f" {found['tokens']} tokens)"
        )
    return lines


def _inside(found: Mapping[str, Any], name: str) -> bool:
    return any(name.startswith(f"{layer['name']}.") for layer in found["layers"])


def _row(row: Mapping[str, Any], kl: float) -> list[str]:
    restored, attributed, error = row["restored"], row["attributed"], row["error"]
    return [
        row["name"],
        "" if restored is None else f"{restored:.4g}",
        "" if restored is None or not kl else f"{restored / kl:.1%}",
        "" if attributed is None else f"{attributed:.4g}",
        "" if error is None else f"{error:.3g}",
    ]
