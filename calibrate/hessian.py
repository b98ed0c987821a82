"""The second moments of a linear's inputs as the quadratic form that its output error is, and its factor.

With H = E[x x^T] the error of a linear's output is E|W x - W' x|^2 = tr((W - W') H (W - W')^T); H is half the Hessian
of that error, hence the name. All methods that use it agree here on damping and on the order of the channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Of each channel's own moment. The moments are those of one text: on other text the error is smaller with a tenth than
# with the hundredth that is usual, although it is larger on the text itself (docs/fidelity.md).
DAMPING = 0.1
# Of the median channel's moment, for channels that were hardly seen. Not of the mean: the inputs of one token in
# hundreds may be thousands of times the others', in a single channel, and the mean is then that channel's.
FLOOR = 0.01
# Of the correction for changed inputs. All of it follows the calibration text too closely (docs/fidelity.md).
CORRECTION = 0.5


@dataclass(frozen=True)
class Factor:
    """H = R R^T with R upper triangular, over the channels in their order of quantisation.

    With the errors E = W - W' the form is |E R|^2: column c of E R depends on the errors of the channels up to c alone,
    so the best code of channel c makes up for them (Babai's nearest plane, which is what GPTQ computes).

    Attributes:
        order: int64 [K], channels by falling second moment.
        feedback: fp32 [K, K] in that order, strictly upper: R_ic / R_cc.
        weights: fp32 [K] in the weight's order: R_cc^2, what an error of the channel costs once later channels have
            made up for what they can.
    """

    order: torch.Tensor
    feedback: torch.Tensor
    weights: torch.Tensor


def damped(hessian: torch.Tensor, damping: float = DAMPING) -> torch.Tensor:
    """H [K, K] with a part of the diagonal, and of its median, added to the diagonal, fp64.

    A channel that was never seen is thereby rounded to nearest, and where none was, all are.
    """
    h = hessian.double()
    diagonal = h.diagonal()
    seen = diagonal[diagonal > 0]
    floor = FLOOR * float(seen.median()) if len(seen) else 1.0
    return h + torch.diag(damping * diagonal + floor)


def factorise(hessian: torch.Tensor) -> Factor:
    """The factor of H [K, K], damped."""
    h = damped(hessian)
    order = torch.argsort(h.diagonal(), descending=True, stable=True)
    # The upper factor is the lower one of the reversed order.
    upper = torch.linalg.cholesky(h[order][:, order].flip(0, 1)).flip(0, 1)
    diagonal = upper.diagonal()
    weights = torch.empty_like(diagonal)
    weights[order] = diagonal.square()
    feedback = (upper / diagonal).float().fill_diagonal_(0)
    return Factor(order, feedback.contiguous(), weights.float())


def correction(missing: torch.Tensor, cholesky: torch.Tensor) -> torch.Tensor:
    """What is added to a weight, fp32 [N, K], to make up for a part of what its outputs miss for changes before it.

    For a miss e of the outputs on the inputs x it is the least squares solution E[e x^T] H^-1. Where e is W (x~ - x),
    with the source model's inputs x~, it is what the asymmetric calibration of GPTAQ (arXiv 2504.02692) sums up to.

    Args:
        missing: E[e x^T], fp32 [N, K].
        cholesky: the lower factor of H = E[x x^T], damped, fp64 [K, K].
    """
    return (CORRECTION * torch.cholesky_solve(missing.double().t(), cholesky).t()).float()
