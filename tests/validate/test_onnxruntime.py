"""The host loop: however a text is cut into chunks and steps, its logits are those of one pass."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from export.phone.artifact import PhoneArtifact
from export.phone.manifest import Port
from models.errors import BadInput
from tests.phone import FloatGraphs, Make, as_artifact, maker
from validate.engines.onnxruntime import measure_host
from validate.engines.run import STEPS, Job, run_engine
from validate.engines.workers.phone_host import Host, cpu_session, from_real, to_real
from validate.greedy import continue_greedily


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return maker(tmp_path_factory)


@pytest.fixture(scope="module")
def hybrid(make: Make) -> FloatGraphs:
    return make("spark2_5, hybrid")


@pytest.fixture(scope="module")
def host(hybrid: FloatGraphs) -> Host:
    return Host(hybrid.folder)


@given(cuts=st.lists(st.integers(1, 40), max_size=6), length=st.integers(1, 64), seed=st.integers(0, 3))
@settings(deadline=None, max_examples=25)
def test_chunks_and_steps_of_any_lengths_are_one_pass(
    hybrid: FloatGraphs, host: Host, cuts: list[int], length: int, seed: int
) -> None:
    ids = hybrid.text(length, seed)
    host.reset()
    found, start = [], 0
    for cut in cuts:
        piece = ids[start : start + cut]
        if len(piece):
            found.append(host.prefill(piece))
        start += len(piece)
    found += [host.decode(int(token))[None] for token in ids[start:]]
    assert np.abs(np.concatenate(found) - hybrid.reference(ids)).max() < 1e-4


def test_a_ring_holds_the_last_entries_wherever_it_wrapped(hybrid: FloatGraphs, host: Host) -> None:
    ids = hybrid.text(50)
    host.score(ids, 7)
    slots = hybrid.manifest.caches["sliding_attention"].slots
    held = host.held["sliding_attention"]
    assert sorted(held) == list(range(50 - slots, 50))
    assert all(position % slots == slot for slot, position in enumerate(held))


def test_a_wrong_slot_or_a_forgotten_mask_would_show(hybrid: FloatGraphs, host: Host) -> None:
    ids = hybrid.text(50)
    expected = hybrid.reference(ids)
    host.score(ids[:49], 0)
    # The ring's positions moved on by one slot: the masks then hide the wrong entries.
    host.held["sliding_attention"] = np.roll(host.held["sliding_attention"], 1)
    host.held["sliding_attention"][3] = 0
    assert np.abs(host.decode(int(ids[49])) - expected[49]).max() > 1e-2


def test_greedy_tokens_are_torchs(hybrid: FloatGraphs, host: Host) -> None:
    prompt = hybrid.text(20, seed=5)
    ids = list(prompt)
    for _ in range(12):
        ids.append(int(hybrid.reference(np.array(ids))[-1].argmax()))
    assert host.continue_greedily(prompt, 12) == ids[20:]


def test_a_text_longer_than_the_context_is_refused(hybrid: FloatGraphs, host: Host) -> None:
    host.score(hybrid.text(64), 1)
    with pytest.raises(ValueError, match="65 tokens; the context holds 64"):
        host.decode(5)


def test_the_runtime_does_not_rewrite_the_graph(hybrid: FloatGraphs) -> None:
    session = cpu_session(hybrid.folder / "decode.onnx")
    level = session.get_session_options().graph_optimization_level
    assert level == onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL


def test_integer_ports_stand_for_real_numbers() -> None:
    port = asdict(Port("past", "past_key", (1, 4), "uint16", scale=0.5, zero_point=100))
    codes = from_real(port, np.float32([[0, 0.5, -60, 1e6]]))
    assert codes.dtype == np.uint16 and codes.tolist() == [[100, 101, 0, 65535]]
    assert to_real(port, codes).tolist() == [[0, 0.5, -50, 32717.5]]


def test_the_engine_in_its_own_process_gives_the_logits_of_the_host_here(hybrid: FloatGraphs, host: Host) -> None:
    artifact = as_artifact(hybrid)
    artifact.check()
    windows = torch.from_numpy(np.stack([hybrid.text(40, seed) for seed in (1, 2)]))
    prompts = windows[:, :10]
    result = run_engine("onnxruntime", Path(sys.executable), Job(artifact, windows, prompts, 5, keep_logits=True))
    assert result.version == onnxruntime.__version__ and result.logits is not None and result.greedy is not None
    for row, window in enumerate(windows):
        logits = torch.from_numpy(host.score(window.numpy(), STEPS))
        assert torch.equal(result.logits[row], logits)
        expected = torch.log_softmax(logits[:-1], -1).gather(1, window[1:, None])[:, 0]
        assert torch.allclose(result.logprobs[row], expected, atol=1e-5)
        assert result.greedy[row].tolist() == host.continue_greedily(prompts[row].numpy(), 5)


def test_float_graphs_lose_nothing_in_the_engine(hybrid: FloatGraphs) -> None:
    artifact = as_artifact(hybrid)
    windows = torch.from_numpy(np.stack([hybrid.text(40, seed) for seed in (1, 2)]))
    greedy = continue_greedily(hybrid.checkpoint, windows[:, :10], 5, torch.float32).tokens
    found, nll = measure_host(artifact, hybrid.checkpoint, windows, windows[:, :10], greedy)
    assert found["snr_db"] > 100 and found["top1"] == 1 and found["greedy"] == {"identical": 2, "of": 2}
    assert found["perplexity_ratio"] == pytest.approx(1, abs=1e-5) and found["tokens"] == 78 and len(nll) == 2


def test_a_damaged_phone_artifact_is_told(make: Make, tmp_path: Path) -> None:
    made = make("llama, tied")
    folder = shutil.copytree(as_artifact(made).folder, tmp_path / "damaged")
    data = bytearray((folder / "model.data").read_bytes())
    data[100] ^= 1
    (folder / "model.data").write_bytes(data)
    (folder / "decode.onnx").unlink()
    with pytest.raises(BadInput) as told:
        PhoneArtifact(folder).check()
    assert [problem.removeprefix(f"{folder}: ") for problem in told.value.problems] == [
        "decode.onnx: named in the ledger, but there is no such file",
        "model.data: its bytes are not those that were written (SHA-256 differs from the ledger)",
    ]
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(BadInput, match="manifest.json: expected the graphs' manifest, found KeyError"):
        PhoneArtifact(folder)
