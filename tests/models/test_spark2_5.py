"""Spark-X2.5 against the vendor's reference code: golden logits and greedy tokens of a random checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

from models.checkpoint import Folder
from models.skeleton import load_model
from models.spark2_5 import Spark2_5Config, Spark2_5ForCausalLM, Spark2_5Model

FOLDER = Path(__file__).parents[1] / "golden" / "spark2_5"
GOLDEN = load_file(FOLDER / "golden.safetensors")
GREEDY = json.loads((FOLDER / "golden.json").read_text())
PROMPTS = ("short", "window_edge", "long")
SLIDING = {"rope_theta": 10_000, "partial_rotary_factor": 1.0}
FULL = {"rope_theta": 5_000_000, "partial_rotary_factor": 0.25}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden model without the golden logits beside it."""
    folder = tmp_path_factory.mktemp("spark2_5")
    for file in FOLDER.iterdir():
        if not file.name.startswith("golden"):
            shutil.copyfile(file, folder / file.name)
    return folder


def load(folder: Path, dtype: torch.dtype, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder)
    for name, value in changes.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, attn_implementation=attention)


def ids(prompt: str) -> torch.Tensor:
    return GOLDEN[f"{prompt}.input_ids"][None]


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    """Of the three prompts' tokens one after the other, [92, vocab]."""
    return torch.cat([model(ids(prompt), use_cache=False).logits[0] for prompt in PROMPTS])


def golden(dtype: str) -> torch.Tensor:
    return torch.cat([GOLDEN[f"{prompt}.{dtype}.logits"] for prompt in PROMPTS])


@contextmanager
def everything_in_float64() -> Iterator[None]:
    """``Tensor.float()`` in the modelling code leaves float64 as it is."""
    to_float = torch.Tensor.float
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", lambda t: t if t.dtype == torch.float64 else to_float(t))
        yield


def distance_in_float64(folder: Path, **changes: Any) -> float:
    """Largest distance of a float64 run from the golden fp32 logits."""
    model = load(folder, torch.float64, **changes)
    with everything_in_float64():
        found = logits(model)
    assert found.dtype == torch.float64
    return float((found - golden("fp32")).abs().max())


def test_a_float64_run_stays_within_the_rounding_of_the_golden_fp32_logits(checkpoint: Path) -> None:
    """The golden fp32 logits themselves lie 2.1e-4 from exact arithmetic (logits reach 37 in this random network),
    and two BLAS code paths of one machine differ by 4e-4: an fp32 run cannot be held to less across processors. A
    float64 run can: its own rounding is nothing, so it measures the golden run's, which is the same everywhere."""
    assert distance_in_float64(checkpoint) < 2.5e-4


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"sliding_attention": SLIDING, "full_attention": {**FULL, "rope_theta": 10_000}}},
        {"rope_parameters": {"sliding_attention": {**SLIDING, "rope_theta": 5_000_000}, "full_attention": FULL}},
        {"rope_parameters": {"sliding_attention": SLIDING, "full_attention": {**FULL, "partial_rotary_factor": 1.0}}},
        {"rope_parameters": {"sliding_attention": {**SLIDING, "partial_rotary_factor": 0.25}, "full_attention": FULL}},
        {"sliding_window": 15},
        {"sliding_window": 17},
        {"layer_types": ["sliding_attention"] * 8},
        {"headwise_attn_output_gate": False},
        {"gate_attn_act_mode": "silu"},
        {"hidden_act": "gelu_pytorch_tanh"},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_every_deliberate_change_of_an_operation_shows_in_float64(checkpoint: Path, changes: dict[str, Any]) -> None:
    assert distance_in_float64(checkpoint, **changes) > 20 * 2.5e-4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_fp32_logits_are_the_golden_ones_up_to_summation_order(checkpoint: Path, attention: str) -> None:
    """Measured: 3.9e-4 at most and 3.6e-6 over all. The float64 test says why 5e-5 absolute cannot hold on another
    processor: the vendor's own rotary and attention code in place of ours gave bit-equal logits on this one."""
    found, expected = logits(load(checkpoint, torch.float32, attention)), golden("fp32")
    assert (found - expected).abs().max() < 1e-3
    assert (found - expected).norm() / expected.norm() < 1.5e-5


@pytest.mark.parametrize("use_cache", [True, False], ids=["cache", "nocache"])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_the_golden_ones(checkpoint: Path, prompt: str, use_cache: bool) -> None:
    model = load(checkpoint, torch.float32)
    found = model.generate(ids(prompt), max_new_tokens=32, min_new_tokens=32, do_sample=False, use_cache=use_cache)
    expected = GREEDY[f"{prompt}.fp32"]["greedy_cache" if use_cache else "greedy_nocache"]
    assert len(expected) == 32
    assert found[0, ids(prompt).shape[1] :].tolist() == expected


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bf16_differs_from_the_golden_bf16_no_more_than_that_from_fp32(checkpoint: Path, attention: str) -> None:
    """The golden bf16 model disagrees with its own fp32 at margins up to 0.61, and ours with it at the same margins,
    so tokens are compared where fp32 is sure by 1.0 (64 of 92 positions). Mean KL, measured: golden fp32 to golden
    bf16 0.028; golden bf16 to ours 0.018 with sdpa and 0.007 with eager attention."""
    found, fp32, bf16 = logits(load(checkpoint, torch.bfloat16, attention)).float(), golden("fp32"), golden("bf16")
    first, second = fp32.topk(2).values.unbind(-1)
    sure = first - second > 1.0
    assert sure.sum() == 64
    assert torch.equal(found.argmax(-1)[sure], bf16.argmax(-1)[sure])
    assert kl(bf16, found) < 1.5 * kl(fp32, bf16)


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_auto_classes_take_our_code_although_the_config_carries_an_auto_map(checkpoint: Path) -> None:
    assert "auto_map" in json.loads((checkpoint / "config.json").read_text())
    assert type(AutoConfig.from_pretrained(checkpoint)) is Spark2_5Config
    assert type(AutoModelForCausalLM.from_pretrained(checkpoint)) is Spark2_5ForCausalLM
    assert type(AutoModel.from_pretrained(checkpoint)) is Spark2_5Model


def test_our_loader_gives_the_same_model_as_from_pretrained(checkpoint: Path) -> None:
    ours = load_model(Folder(checkpoint), torch.float32)
    assert torch.equal(logits(ours), logits(load(checkpoint, torch.float32)))
    assert ours.lm_head.weight is ours.model.embedding.weight


def test_rotary_frequencies_are_fp32_and_real_also_in_a_bf16_model(checkpoint: Path) -> None:
    rotary = load(checkpoint, torch.bfloat16).model.rotary_emb
    expected = 1.0 / 5e6 ** (torch.arange(0, 16, 2) / 16)
    assert torch.equal(rotary.full_attention_inv_freq, expected)
    cos, sin = rotary(torch.tensor([[0, 1, 4096]]), "full_attention")
    assert cos.dtype == torch.float32 and cos.shape == (1, 3, 16)
    assert torch.allclose(sin[0, 2, :8].double(), (4096 * expected.double()).sin(), atol=2e-4)


def test_padding_on_the_left_does_not_change_the_logits(checkpoint: Path) -> None:
    model, prompt = load(checkpoint, torch.float32), ids("long")
    padded = torch.cat((torch.full((1, 5), 2), prompt), dim=1)
    mask = torch.cat((torch.zeros(1, 5, dtype=torch.long), torch.ones_like(prompt)), dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        found = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 5:]
        expected = model(prompt, use_cache=False).logits
    assert (found - expected).abs().max() < 2e-3


def test_labels_give_the_mean_cross_entropy_and_logits_to_keep_the_last_ones(checkpoint: Path) -> None:
    model, prompt = load(checkpoint, torch.float32), ids("long")
    with torch.no_grad():
        output = model(prompt, labels=prompt, use_cache=False)
        last = model(prompt, logits_to_keep=1, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(output.logits[0, :-1], prompt[0, 1:])
    assert torch.allclose(output.loss, expected, rtol=1e-5)
    assert last.shape == (1, 1, 512) and torch.allclose(last[0, 0], output.logits[0, -1], atol=1e-3)


def test_ids_and_embeddings_together_are_refused(checkpoint: Path) -> None:
    model = load(checkpoint, torch.float32)
    with pytest.raises(ValueError, match="exactly one"):
        model(ids("short"), inputs_embeds=model.model.embedding(ids("short")))
    with pytest.raises(ValueError, match="exactly one"):
        model()


def test_default_layer_types_are_three_sliding_then_one_full() -> None:
    config = Spark2_5Config(num_hidden_layers=6)
    assert [t.split("_")[0] for t in config.layer_types or ()] == ["sliding"] * 3 + ["full"] + ["sliding"] * 2
    default = {"rope_type": "default"}
    assert config.rope_parameters == {"sliding_attention": SLIDING | default, "full_attention": FULL | default}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["linear_attention"]}, "found 'linear_attention'"),
        ({"rope_parameters": {"sliding_attention": SLIDING}}, "no rope_theta for 'full_attention'"),
        ({"rope_parameters": {"sliding_attention": SLIDING, "full_attention": {}}}, "no rope_theta for 'full"),
        ({"rope_parameters": [SLIDING]}, "no rope_theta for 'full_attention'"),
        (
            {"rope_parameters": {"sliding_attention": SLIDING, "full_attention": {**FULL, "rope_type": "yarn"}}},
            "rope_type: expected default, found 'yarn'",
        ),
        ({"gate_attn_act_mode": "tanh"}, "expected sigmoid or silu, found 'tanh'"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "6 is not a multiple of num_key_value_heads 4"),
        ({"num_key_value_heads": 0}, "not a multiple of num_key_value_heads 0"),
    ],
)
def test_configurations_that_the_model_does_not_define_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spark2_5Config(num_hidden_layers=4, **values)


def test_all_problems_of_a_configuration_come_in_one_message() -> None:
    with pytest.raises(ValueError) as error:
        Spark2_5Config(num_hidden_layers=2, layer_types=["x"], gate_attn_act_mode="y", num_key_value_heads=3)
    assert str(error.value).count(";") == 3
