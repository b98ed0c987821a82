"""A source, opened and checked against the model that its configuration describes; nothing but headers is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from models.checkpoint import Checkpoint
from models.family import Dimensions, Family, Linear, family_of, find_linears
from models.skeleton import check_tensors, skeleton


@dataclass(frozen=True)
class OpenedModel:
    """A checkpoint and what its family's data says of it."""

    checkpoint: Checkpoint
    family: Family
    dimensions: Dimensions
    linears: Sequence[Linear]
    vocabulary: int


def open_model(checkpoint: Checkpoint) -> OpenedModel:
    """Checks a checkpoint's tensors against its configuration.

    Raises:
        BadInput: for an unknown family, a configuration that makes no model, and for every missing, unexpected or
            misshapen tensor.
    """
    family = family_of(checkpoint.config, checkpoint.name)
    model = skeleton(checkpoint, torch.bfloat16)
    check_tensors(checkpoint, model)
    dimensions = Dimensions.of(model.config)
    linears = find_linears(family, dimensions, checkpoint.tensors)
    return OpenedModel(checkpoint, family, dimensions, linears, model.config.vocab_size)
