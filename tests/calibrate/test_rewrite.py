"""Rewrites change the weights and not the function, for every family and in every order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from calibrate.rewrite import Rewritten, fold_norms, rotate_residual, rotate_values, scalable, scale_channels
from calibrate.rotation import random_hadamard
from models.checkpoint import Checkpoint, Folder, TensorInfo
from models.errors import BadInput
from models.opened import OpenedModel, open_model
from models.skeleton import load_model
from tests.helpers import NoFiles, tiny_checkpoint, tokens

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tied": ("llama", {}),
    "llama-biases": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama-odd": ("llama", {"hidden_size": 96, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {}),
    "phi3": ("phi3", {}),
    "spark2_5": ("spark2_5", {}),
    "spark2_5-biases": ("spark2_5", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "spark2_5-ungated": ("spark2_5", {"headwise_attn_output_gate": False, "num_hidden_layers": 2}),
}
Rewrite = Callable[[OpenedModel], OpenedModel]


def fold(model: OpenedModel) -> OpenedModel:
    return fold_norms(model, torch.float64)


def residual(model: OpenedModel) -> OpenedModel:
    return rotate_residual(model, random_hadamard(model.dimensions.hidden, 0), torch.float64)


def values(model: OpenedModel) -> OpenedModel:
    return rotate_values(model, random_hadamard(model.dimensions.head_dim, 1), torch.float64)


def scaled(model: OpenedModel) -> OpenedModel:
    return scale_channels(model, random_factors(model), torch.float64)


def random_factors(model: OpenedModel) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.exp(torch.randn(channels, generator=generator)) for name, (channels, _) in scalable(model).items()
    }


def all_of_them(model: OpenedModel) -> OpenedModel:
    return values(residual(scaled(model)))


def scaled_after_rotation(model: OpenedModel) -> OpenedModel:
    return scaled(values(residual(model)))


REWRITES = [fold, residual, values, scaled, all_of_them, scaled_after_rotation]
# Every rewrite on models of each shape, and both orders of all of them on the rest.
PAIRS = [
    (case, rewrite)
    for case in CASES
    for rewrite in (REWRITES if case in ("llama-biases", "phi3", "spark2_5") else REWRITES[-2:])
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], OpenedModel]:
    models: dict[str, OpenedModel] = {}

    def get(case: str) -> OpenedModel:
        if case not in models:
            model_type, config = CASES[case]
            models[case] = open_model(Folder(tiny_checkpoint(tmp_path_factory.mktemp(case), model_type, **config)))
        return models[case]

    return get


@torch.no_grad()
def logits(checkpoint: Checkpoint) -> torch.Tensor:
    return load_model(checkpoint, torch.float64)(tokens(2, 40), use_cache=False).logits


@pytest.mark.parametrize(("case", "rewrite"), PAIRS, ids=[f"{case} {rewrite.__name__}" for case, rewrite in PAIRS])
def test_the_function_stays_the_same(case: str, rewrite: Rewrite, opened: Callable[[str], OpenedModel]) -> None:
    model = opened(case)
    view = rewrite(model)
    before, after = logits(model.checkpoint), logits(view.checkpoint)
    # The norms compute in fp32 whatever the model's dtype.
    assert float((before - after).norm() / before.norm()) < 2e-6
    # A rewrite that did nothing would pass the line above.
    value = view.linears[2]
    changed = view.checkpoint.read(f"{value.module}.weight")[value.start : value.stop].float()
    assert not torch.allclose(
        changed, model.checkpoint.read(f"{value.module}.weight")[value.start : value.stop].float(), atol=1e-3
    )


@pytest.mark.parametrize("case", ["llama-tied", "phi3", "spark2_5"])
def test_a_rewritten_checkpoint_opens_like_any_other(case: str, opened: Callable[[str], OpenedModel]) -> None:
    view = open_model(all_of_them(opened(case)).checkpoint)
    assert view.checkpoint.config["tie_word_embeddings"] is False and "lm_head.weight" in view.checkpoint.tensors
    assert view.checkpoint.config["dtype"] == "float64"
    assert {info.dtype for info in view.checkpoint.tensors.values()} == {torch.float64}
    assert set(view.checkpoint.side_files()) == set(opened(case).checkpoint.side_files())
    assert logits(view.checkpoint).isfinite().all()


def test_folded_norms_are_ones_and_the_tied_head_holds_the_final_norm(opened: Callable[[str], OpenedModel]) -> None:
    model = opened("llama-tied")
    view = fold_norms(model, torch.float32).checkpoint
    for name in ("model.norm", "model.layers.0.input_layernorm", "model.layers.1.post_attention_layernorm"):
        assert torch.equal(view.read(f"{name}.weight"), torch.ones(128))
    table = model.checkpoint.read("model.embed_tokens.weight").float()
    norm = model.checkpoint.read("model.norm.weight").float()
    assert torch.equal(view.read("model.embed_tokens.weight"), table)
    assert torch.equal(view.read("lm_head.weight"), table * norm)


def test_a_view_rounds_once_to_its_dtype(opened: Callable[[str], OpenedModel]) -> None:
    """Views stack in fp32: rounding to bf16 after each would add errors."""
    model = opened("llama-tied")
    hidden, head = random_hadamard(128, 0), random_hadamard(32, 1)
    half = rotate_values(rotate_residual(model, hidden, torch.bfloat16), head, torch.bfloat16)
    wide = rotate_values(rotate_residual(model, hidden, torch.float32), head, torch.float32)
    for name in wide.checkpoint.tensors:
        assert torch.equal(half.checkpoint.read(name), wide.checkpoint.read(name).bfloat16())


def test_reading_twice_gives_the_same_and_never_changes_the_base(opened: Callable[[str], OpenedModel]) -> None:
    model = opened("spark2_5")
    held = {name: model.checkpoint.read(name).float() for name in model.checkpoint.tensors}

    class Held(NoFiles):
        """Hands out the very tensors that it holds, in the dtype that edits compute in."""

        name, config = "held", model.checkpoint.config
        tensors = {name: TensorInfo(torch.float32, tuple(value.shape)) for name, value in held.items()}

        def read(self, name: str) -> torch.Tensor:
            return held[name]

    before = {name: value.clone() for name, value in held.items()}
    view = scaled(residual(replace(model, checkpoint=Held()))).checkpoint
    first = {name: view.read(name) for name in view.tensors}
    assert all(torch.equal(view.read(name), first[name]) for name in view.tensors)
    assert all(torch.equal(held[name], before[name]) for name in held)


def test_the_hash_tells_rewrites_apart(opened: Callable[[str], OpenedModel]) -> None:
    model = opened("llama-tied")
    views = [
        model,
        fold(model),
        fold_norms(model, torch.bfloat16),
        residual(model),
        values(residual(model)),
        residual(values(model)),
        scaled(model),
        rotate_residual(model, random_hadamard(128, 5), torch.float64),
    ]
    hashes = [view.checkpoint.hashes() for view in views]
    assert len({str(h) for h in hashes}) == len(views)
    assert all(h.items() >= hashes[0].items() for h in hashes)
    assert residual(model).checkpoint.hashes() == hashes[3]


def test_a_family_without_links_is_refused(opened: Callable[[str], OpenedModel]) -> None:
    model = opened("llama-tied")
    other = replace(model, family=replace(model.family, links=None))
    for rewrite in (fold, residual, values):
        with pytest.raises(BadInput, match="cannot be folded, rotated or rescaled: its family's data names no links"):
            rewrite(other)


def test_a_norm_with_a_bias_can_be_scaled_but_not_folded(opened: Callable[[str], OpenedModel]) -> None:
    model = opened("llama-tied")
    bias = "model.layers.1.input_layernorm.bias"

    class Biased(Rewritten):
        def __init__(self) -> None:
            super().__init__(model.checkpoint, {}, "biased", torch.float32, {bias: "model.norm.weight"})

    other = replace(model, checkpoint=Biased())
    with pytest.raises(BadInput, match=f"{bias}: a norm with a bias cannot be folded"):
        residual(other)
    factor = torch.full((128,), 2.0)
    view = scale_channels(other, {bias.removesuffix(".bias"): factor}, torch.float32).checkpoint
    assert torch.equal(view.read(bias), other.checkpoint.read(bias) / 2)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("model.layers.0.input_layernorm", torch.ones(127)),
        ("model.layers.0.input_layernorm", torch.zeros(128)),
        ("model.layers.0.input_layernorm", torch.full((128,), torch.inf)),
        ("model.layers.0.self_attn.q_proj", torch.ones(128)),
    ],
)
def test_impossible_factors_are_refused(name: str, factor: torch.Tensor, opened: Callable[[str], OpenedModel]) -> None:
    with pytest.raises(ValueError, match=name):
        scale_channels(opened("llama-tied"), {name: factor}, torch.float32)


def test_a_rotation_of_another_size_is_refused(opened: Callable[[str], OpenedModel]) -> None:
    with pytest.raises(ValueError, match="a rotation of 64 for a hidden size of 128"):
        rotate_residual(opened("llama-tied"), random_hadamard(64, 0), torch.float32)
    with pytest.raises(ValueError, match="a rotation of 64 for a head size of 32"):
        rotate_values(opened("llama-tied"), random_hadamard(64, 0), torch.float32)


@pytest.mark.parametrize(
    "tensor", ["model.layers.1.mlp.up_proj.weight", "model.layers.1.post_attention_layernorm.weight"]
)
def test_a_weight_that_is_not_finite_is_named_before_it_spreads(tensor: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path, "llama")
    weights = load_file(folder / "model.safetensors")
    weights[tensor].view(-1)[5] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    view = residual(open_model(Folder(folder)))
    with pytest.raises(BadInput, match=f"{tensor}: expected finite weights, found nan"):
        view.checkpoint.read("model.layers.1.mlp.up_proj.weight")
