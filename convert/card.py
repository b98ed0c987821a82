"""The model card of a published artifact: what it is, what it lost, what it does not do, and how to load it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from convert.snippets import snippets
from export.artifact import source_card
from export.opened import AnyArtifact
from export.phone.artifact import PhoneArtifact
from validate.report import engine_ratio

TEMPLATE = Path(__file__).parent / "templates" / "card.md.j2"


@dataclass(frozen=True)
class Kind:
    """What the card says of a format.

    Attributes:
        device: what it is for.
        how: the numbers that it holds.
        library, tags: as the hub names them.
    """

    device: str
    how: str = "in 4 bits"
    library: str = "transformers"
    tags: tuple[str, ...] = ("4-bit",)


KINDS: Mapping[str, Kind] = {
    "gptq": Kind("x86 CPUs with AMX"),
    "awq": Kind("CPUs of any kind"),
    "tinygemm": Kind("x86 CPUs without AMX, and ARM CPUs"),
    "phone": Kind(
        "the NPUs of phones", "as ONNX graphs with 8-bit weights and 16-bit activations", "onnx", ("8-bit", "onnx")
    ),
}
# Of a source's own card; what else it says is about another model.
INHERITED = ("license", "license_name", "license_link", "language", "pipeline_tag")


@dataclass(frozen=True)
class Origin:
    """What the artifact cannot know of its source.

    Attributes:
        base_model: its id on the hub.
        license: an identifier of the hub's list of licences.
    """

    base_model: str | None = None
    license: str | None = None


def model_card(artifact: AnyArtifact, repo: str, origin: Origin) -> ModelCard:
    """The card of a validated artifact; the same bytes give the same card.

    Args:
        repo: where it will be.
    """
    ledger, report = artifact.ledger, _report(artifact)
    format, kind = artifact.format, KINDS[artifact.format]
    inherited = source_facts(artifact)
    data = ModelCardData(
        base_model=origin.base_model or base_model(artifact),
        license=origin.license or inherited.get("license"),
        license_name=None if origin.license else inherited.get("license_name"),
        license_link=None if origin.license else inherited.get("license_link"),
        language=inherited.get("language"),
        library_name=kind.library,
        pipeline_tag=inherited.get("pipeline_tag", "text-generation"),
        tags=["edge-convert", format, *kind.tags, "quantized"],
        model_name=repo.rpartition("/")[2],
        eval_results=_results(artifact),
    )
    if data.base_model:
        data["base_model_relation"] = "quantized"
    source = _text(data.base_model or ledger.source["name"])
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        title=_text(repo.rpartition("/")[2]),
        source=f"[{source}](https://huggingface.co/{source})" if data.base_model else source,
        device=kind.device,
        how=kind.how,
        format=format,
        bits=f"{report['bits_per_weight']:.4g}",
        size=_size(report["file_bytes"]),
        maker=_maker(ledger.versions),
        dtype=ledger.dtype,
        rows=_rows(report),
        measured=_measured(artifact),
        gates=[{**gate, "measured": _number(gate["measured"])} for gate in report["gates"]],
        limits=_limits(artifact, bool(data.license)),
        snippets=snippets(format, str(artifact.model_config["model_type"]), repo, ledger.dtype),
        origin=_origin(artifact),
    )


def base_model(artifact: AnyArtifact) -> str | None:
    """The source's id on the hub, where it came from there."""
    source = artifact.ledger.source
    if not source.get("hub"):
        return None
    try:
        validate_repo_id(source["name"])
    except HFValidationError:
        return None
    return str(source["name"])


def source_facts(artifact: AnyArtifact) -> dict[str, Any]:
    """What the source's card, its container or its licence file says of licence and language."""
    card = artifact.folder / source_card(())
    # A card without its yaml states nothing, and huggingface_hub would warn of it.
    if card.is_file() and card.read_text(encoding="utf-8", errors="replace").startswith("---"):
        stated = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
        facts = {key: stated[key] for key in INHERITED if key in stated}
    else:
        facts = {}
    if "license" not in facts and artifact.ledger.source.get("license"):
        facts["license"] = artifact.ledger.source["license"]
    files = sorted(name for name in artifact.ledger.files if name.upper().startswith(("LICENSE", "LICENCE")))
    if "license" not in facts and files:
        facts |= {"license": "other", "license_name": "source", "license_link": files[0]}
    return facts


def _report(artifact: AnyArtifact) -> Mapping[str, Any]:
    validation = artifact.ledger.validation
    assert validation is not None  # see convert.upload.check
    report: Mapping[str, Any] = validation["report"]
    return report


def _results(artifact: AnyArtifact) -> list[EvalResult]:
    validation = artifact.ledger.validation
    assert validation is not None
    dataset = validation["settings"]["dataset"]
    files = [Path(file).name for file in dataset.get("data_files") or ()]
    metrics = {
        "perplexity": "Perplexity",
        "perplexity_ratio": "Perplexity, ratio to the source's",
        "kl": "KL divergence from the source, nats per token",
        "top1": "Same first choice as the source",
    }
    report = _report(artifact)
    # Where the engine rounds activations as well, its figures are the artifact's.
    figures = report["engine"] if "snr_db" in report["engine"] else report
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=Path(dataset["path"]).name if dataset["path"].startswith((".", "/")) else dataset["path"],
            dataset_name=", ".join(files) or dataset["path"],
            dataset_config=dataset.get("name"),
            dataset_split=dataset["split"],
            metric_type=metric,
            metric_name=name,
            metric_value=figures[metric],
        )
        for metric, name in metrics.items()
    ]


def _rows(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    greedy, engine = report["greedy"], report["engine"]
    reference = report["perplexity"] / report["perplexity_ratio"]
    rows = [
        ("perplexity", f"{report['perplexity']:.3f} ± {report['perplexity_se']:.3f}", f"{reference:.3f}"),
        ("ratio", f"{report['perplexity_ratio']:.4f} ± {report['perplexity_ratio_se']:.4f} (paired)", "1"),
    ]
    if (computed := engine_ratio(engine)) is not None:
        ratio, error = (_number(value) for value in computed)
        rows.append((f"ratio as the engine computes it: {_text(engine['name'])}", f"{ratio} ± {error}", "1"))
    rows += [
        ("KL divergence, nats per token", _number(report["kl"]), "0"),
        ("same first choice", f"{report['top1']:.1%}", "100%"),
        ("signal to noise of the logits", f"{report['snr_db']:.1f} dB", ""),
        (f"greedy continuations of {greedy['tokens']} tokens, identical", f"{greedy['identical']}/{greedy['of']}", ""),
    ]
    if "snr_db" in engine:
        same, prompts = engine["greedy"]["identical"], engine["greedy"]["of"]
        rows += [
            ("the same by the engine, against the source in float32: KL divergence", _number(engine["kl"]), "0"),
            ("same first choice", f"{engine['top1']:.1%}", "100%"),
            ("signal to noise of the logits", f"{engine['snr_db']:.1f} dB", ""),
            (f"greedy continuations of {greedy['tokens']} tokens, identical", f"{same}/{prompts}", ""),
        ]
    for ran in report["engines"]:
        if "cpu_snr_db" in ran:
            what = f"signal to noise in {ran['name']} {ran['version']}, on {ran['tokens']} tokens"
            rows.append((what, f"{ran['snr_db']:.1f} dB", f"{ran['cpu_snr_db']:.1f} dB on the CPU"))
        elif "perplexity" in ran:
            rows.append((f"perplexity in {ran['name']} {ran['version']}", _number(ran["perplexity"]), ""))
    return rows


def _measured(artifact: AnyArtifact) -> str:
    validation = artifact.ledger.validation
    assert validation is not None
    settings, report = validation["settings"], validation["report"]
    name = _results(artifact)[0].dataset_name
    return (
        f"Measured from the bytes of the artifact on {report['tokens']} tokens of {_text(name)}, in {report['windows']}"
        f" windows of {settings['sequence_length']} that do not overlap"
        + (
            f"; as the engine computes it on {report['engine']['tokens']} of them."
            if "gap" in report["engine"]
            else "."
        )
    )


def _limits(artifact: AnyArtifact, licensed: bool) -> list[str]:
    ledger, report = artifact.ledger, _report(artifact)
    limits = [_text(note) for note in ledger.notes]
    reasons = Counter(report["kept"].values())
    limits += [f"{count} tensors stay as they are: {_text(reason)}" for reason, count in reasons.items()]
    if "skipped" in report["engine"]:
        engine = report["engine"]
        limits.append(f"Not measured: {_text(engine['name'])} ({_text(engine['skipped'])})")
    if isinstance(artifact, PhoneArtifact):
        limits += _phone_limits(artifact)
    if artifact.format == "tinygemm":
        isa = ledger.target.get("isa") or "one machine"
        limits.append(f"The bytes are packed for {isa}; the loaders repack them, once, where the machine is another")
    if ledger.calibration is None:
        limits.append("No text was used for calibration")
    if not licensed:
        limits.append("The source states no licence; ask its authors before you use it")
    return [*limits, "Losses on other text may be larger, above all on text that is unlike the calibration's"]


def _phone_limits(artifact: PhoneArtifact) -> list[str]:
    manifest, report = artifact.manifest, _report(artifact)
    run = ["ONNX Runtime on a CPU"] if "skipped" not in report["engine"] else []
    run += [engine["name"] for engine in report["engines"] if "failed" not in engine]
    return [
        f"The caches hold {manifest.context} positions: no text is longer; prompts go through in chunks of"
        f" {manifest.prefill} tokens",
        "The ranges of all activations are fixed, by the calibration text",
        f"Run by {', '.join(run) or 'nothing'}, and on no phone",
    ]


def _origin(artifact: AnyArtifact) -> list[tuple[str, str]]:
    ledger = artifact.ledger
    source, target, calibration = ledger.source, ledger.target, ledger.calibration
    rows = [("source", _text(source["name"]))]
    if source.get("revision"):
        rows.append(("revision", _text(source["revision"])))
    rows += [(f"SHA-256 of {_text(name)}", value) for name, value in source["files"].items() if _is_weight(name)]
    rows.append(("method", ", ".join(target.get("method", ()))))
    if "group_size" in target:
        rows.append(("group size", str(target["group_size"])))
    if calibration is not None:
        files = ", ".join(Path(file).name for file in calibration["dataset"].get("data_files") or ())
        text = files or calibration["dataset"]["path"]
        drawn = f"{calibration['samples']} windows of {calibration['sequence_length']} of {_text(text)}"
        own = calibration.get("generated", 0)
        rows.append(("calibration", f"{drawn}, and {own} that the source wrote itself" if own else drawn))
    rows += [(name, version) for name, version in ledger.versions.items() if version != "not installed"]
    return rows


def _maker(versions: Mapping[str, str]) -> str:
    version = versions.get("edge-convert", "not installed")
    return "edge-convert" if version == "not installed" else f"edge-convert {version}"


def _is_weight(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".bin"))


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4g}"


def _text(value: Any) -> str:
    """A value inside Markdown: on one line, and no end of a table's cell."""
    return " ".join(str(value).split()).replace("|", "\\|")


def _size(count: int) -> str:
    return f"{count / 10**6:,.1f} MB" if count < 10**9 else f"{count / 10**9:,.2f} GB"
