"""The rewrites that a target's ``method`` may begin with: ``fold`` and ``rotate``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from calibrate.rewrite import fold_norms, rotate_residual, rotate_values
from calibrate.rotation import random_hadamard
from models.opened import OpenedModel

# Of the rotations of the residual stream and of the value heads.
SEED, VALUES_SEED = 0, 1


def rewritten(model: OpenedModel, method: Sequence[str], dtype: torch.dtype, values: bool = False) -> OpenedModel:
    """The model in other weights: ``fold`` folds the norms into the linears, ``rotate`` rotates the residual stream as
    well, which spreads a massive channel over all of them.

    Args:
        method: names of methods; others are not looked at.
        dtype: of the view's tensors.
        values: whether ``rotate`` rotates the value heads too.

    Raises:
        BadInput: for a family that cannot be rewritten.
    """
    if "rotate" in method:
        view = rotate_residual(model, random_hadamard(model.dimensions.hidden, SEED), dtype)
        return rotate_values(view, random_hadamard(model.dimensions.head_dim, VALUES_SEED), dtype) if values else view
    return fold_norms(model, dtype) if "fold" in method else model
