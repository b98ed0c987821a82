"""The same function in other weights: norms folded, the residual stream or the heads rotated, channels rescaled.

Every rewrite is a view of a checkpoint: a tensor is read from the base and changed when it is asked for, so a model
is never held twice. Views stack, and a tensor passes all of them in one wide dtype before it is rounded once.

A linear computes ``y = x W^T + b`` with W [N, K]. With a diagonal D or an orthogonal matrix R between two modules,
the one that writes becomes ``y R`` (``W -> R^T W``, ``b -> b R``) and the ones that read become ``W -> W R``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from calibrate.grid import check_finite
from calibrate.rotation import Rotation
from models.checkpoint import Checkpoint, TensorInfo, View
from models.errors import BadInput
from models.family import Linear, Links
from models.opened import OpenedModel

Read = Callable[[str], torch.Tensor]
# A tensor in the wide dtype, which the edit may change in place, and a reader of the base's other tensors.
Edit = Callable[[torch.Tensor, Read], torch.Tensor]


class Rewritten(View):
    """A checkpoint whose tensors are edited when they are read.

    Args:
        base: the weights before; may be such a view itself.
        edits: by tensor name, in the order in which they apply.
        what: names the rewrite and its parameters; part of `hashes`.
        dtype: of all floating point tensors; edits run in it, and at least in fp32.
        copies: new tensors by name, and the base's tensor that each starts from.
    """

    def __init__(
        self,
        base: Checkpoint,
        edits: Mapping[str, Sequence[Edit]],
        what: str,
        dtype: torch.dtype,
        copies: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(base)
        self.edits, self.what, self.dtype = dict(edits), what, dtype
        self.copies = dict(copies or {})
        self.config = {k: v for k, v in base.config.items() if k != "torch_dtype"}
        self.config["dtype"] = str(dtype).removeprefix("torch.")
        if self.copies:
            self.config["tie_word_embeddings"] = False
        names = [*base.tensors, *self.copies]
        self.tensors = {name: self._info(base.tensors[self.copies.get(name, name)]) for name in names}

    def _info(self, info: TensorInfo) -> TensorInfo:
        return replace(info, dtype=self.dtype) if info.dtype.is_floating_point else info

    def read(self, name: str) -> torch.Tensor:
        """The edited tensor. Raises BadInput when it, or a tensor that was folded into it, is not finite."""
        if not self.tensors[name].dtype.is_floating_point:
            return self.base.read(name)
        value = self.wide(name, torch.promote_types(self.dtype, torch.float32)).to(self.dtype)
        check_finite(f"{self.name}: {name}, rewritten to {self.dtype}".replace("torch.", ""), value)
        return value

    def wide(self, name: str, compute: torch.dtype) -> torch.Tensor:
        """The edited tensor before its last rounding; the caller may change it in place."""
        value = _wide(self.base, self.copies.get(name, name), compute)
        for edit in self.edits.get(name, ()):
            value = edit(value, lambda other: _wide(self.base, other, compute))
        return value

    def rewrites(self, name: str) -> tuple[str, ...]:
        """In words, what was done to a tensor, first to last; empty for one that is the base's."""
        start = self.copies.get(name, name)
        below = self.base.rewrites(start) if isinstance(self.base, Rewritten) else ()
        copied = (f"a copy of {start}",) if name in self.copies else ()
        # Without the hash of its parameters.
        done = (" ".join(self.what.split()[:2]),) if name in self.edits else ()
        return (*below, *copied, *done)

    def copied(self, name: str) -> bool:
        """Whether the source has no such tensor."""
        return name in self.copies or (isinstance(self.base, Rewritten) and self.base.copied(name))

    def hashes(self) -> dict[str, str]:
        """The base's files and, under ``rewritten``, the hash of all rewrites down to it."""
        below = self.base.hashes()
        chain = f"{below.get('rewritten', '')} {self.what} {self.dtype}"
        return below | {"rewritten": hashlib.sha256(chain.encode()).hexdigest()}


def _wide(checkpoint: Checkpoint, name: str, compute: torch.dtype) -> torch.Tensor:
    if isinstance(checkpoint, Rewritten):
        return checkpoint.wide(name, compute)
    value = checkpoint.read(name)
    check_finite(f"{checkpoint.name}: {name}", value)
    return value.to(compute, copy=True)


def fold_norms(model: OpenedModel, dtype: torch.dtype) -> OpenedModel:
    """Norm weights go into the linears that read the norms and become ones; a tied head gets its own tensor.

    Args:
        dtype: of the view's floating point tensors.

    Raises:
        BadInput: for a family without links, or a norm that has a bias (which no linear without one could take).
    """
    edits, copies = _folded(model, _links(model))
    return _view(model, edits, "fold norms", dtype, copies)


def rotate_residual(model: OpenedModel, rotation: Rotation, dtype: torch.dtype) -> OpenedModel:
    """Norms folded as in `fold_norms`, then the residual stream rotated: every module that writes or reads it.

    An RMS norm without a weight commutes with a rotation, since it only divides by the stream's length.

    Args:
        rotation: of the model's hidden size.

    Raises:
        BadInput: as in `fold_norms`.
        ValueError: for a rotation of another size.
    """
    family, links = model.family, _links(model)
    if rotation.size != model.dimensions.hidden:
        raise ValueError(f"a rotation of {rotation.size} for a hidden size of {model.dimensions.hidden}")
    edits, copies = _folded(model, links)
    edits.setdefault(f"{family.embedding}.weight", []).append(lambda value, _: rotation.apply(value))
    for _, readers in _norms(model, links):
        for reader in readers:
            edits[f"{reader.module}.weight"].append(_on_rows(reader, rotation.apply))
    for writer in _each_layer(model, links.residual):
        _write(model, edits, writer, lambda rows: rotation.apply(rows.t()).t(), rotation.apply)
    return _view(model, edits, f"rotate residual {_digest(rotation.signs, *rotation.factors)}", dtype, copies)


def rotate_values(model: OpenedModel, rotation: Rotation, dtype: torch.dtype) -> OpenedModel:
    """Rotates every value head, and back in the linear that reads them.

    Args:
        rotation: of the model's head size; the same for all heads and layers.

    Raises:
        BadInput: for a family without links.
        ValueError: for a rotation of another size.
    """
    size = model.dimensions.head_dim
    if rotation.size != size:
        raise ValueError(f"a rotation of {rotation.size} for a head size of {size}")
    edits: dict[str, list[Edit]] = {}

    def columns(rows: torch.Tensor) -> torch.Tensor:
        return rotation.apply(rows.unflatten(-1, (-1, size))).flatten(-2)

    value_name, output_name = _links(model).values
    for value in _each_layer(model, [value_name]):
        _write(model, edits, value, lambda rows: columns(rows.t()).t(), columns)
    for output in _each_layer(model, [output_name]):
        edits.setdefault(f"{output.module}.weight", []).append(_on_rows(output, columns))
    return _view(model, edits, f"rotate values {_digest(rotation.signs, *rotation.factors)}", dtype)


def scale_channels(model: OpenedModel, factors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> OpenedModel:
    """Divides the output channels of a norm or a linear by factors, and multiplies them in what reads them.

    Args:
        factors: positive [channels] by full name: a layer's norm (``model.layers.0.input_layernorm``), the final norm,
            the value projection or the linear that is a factor of another's input, all by split name. See `scalable`.

    Raises:
        BadInput: for a family without links.
        ValueError: for a name that cannot be scaled, or factors of the wrong shape, not positive or not finite.
    """
    links = _links(model)
    targets = scalable(model)
    wrong = sorted(set(factors) - set(targets))
    if wrong:
        raise ValueError(f"cannot scale {', '.join(wrong)}")
    edits: dict[str, list[Edit]] = {}
    copies: dict[str, str] = {}
    linears = {linear.name: linear for linear in _each_layer(model, [links.values[0], links.product[0]])}
    for name, factor in factors.items():
        channels, readers = targets[name]
        if tuple(factor.shape) != (channels,) or not bool((factor.isfinite() & (factor > 0)).all()):
            raise ValueError(f"{name}: expected {channels} positive finite factors")
        factor = factor.double()
        if name in linears:
            _write(model, edits, linears[name], _by(1 / factor[:, None]), _by(1 / factor))
        else:
            for leaf in ("weight", "bias"):
                if f"{name}.{leaf}" in model.checkpoint.tensors:
                    edits.setdefault(f"{name}.{leaf}", []).append(_whole(_by(1 / factor)))
        for reader in readers:
            spread = factor
            if reader.columns != channels:
                # Query heads in groups share a value head.
                heads = factor.unflatten(0, (-1, model.dimensions.head_dim))
                spread = heads.repeat_interleave(reader.columns // channels, 0).flatten()
            edits.setdefault(f"{reader.module}.weight", []).append(_on_rows(reader, _by(spread)))
            if reader.layer is None:
                copies |= _untied(model)
    return _view(model, edits, f"scale channels {sorted(factors)} {_digest(*factors.values())}", dtype, copies)


def scalable(model: OpenedModel) -> dict[str, tuple[int, tuple[Linear, ...]]]:
    """Everything that `scale_channels` takes: its channels, and the linears that read them, by full name.

    Raises:
        BadInput: for a family without links.
    """
    links = _links(model)
    found = {norm: (readers[0].columns, tuple(readers)) for norm, readers in _norms(model, links)}
    for writer, reader in (links.values, links.product):
        pairs = zip(_each_layer(model, [writer]), _each_layer(model, [reader]), strict=True)
        found |= {first.name: (first.rows, (second,)) for first, second in pairs}
    return found


def _links(model: OpenedModel) -> Links:
    if model.family.links is None:
        raise BadInput(
            f"{model.checkpoint.name}: the weights of a {model.checkpoint.config.get('model_type')} model cannot be"
            " folded, rotated or rescaled: its family's data names no links between norms and linears"
        )
    return model.family.links


def _view(
    model: OpenedModel,
    edits: Mapping[str, Sequence[Edit]],
    what: str,
    dtype: torch.dtype,
    copies: Mapping[str, str] | None = None,
) -> OpenedModel:
    return replace(model, checkpoint=Rewritten(model.checkpoint, edits, what, dtype, copies))


def _untied(model: OpenedModel) -> dict[str, str]:
    """The head's tensor and the table that it starts from, when it has none of its own."""
    head, table = f"{model.family.head}.weight", f"{model.family.embedding}.weight"
    return {} if head in model.checkpoint.tensors else {head: table}


def _folded(model: OpenedModel, links: Links) -> tuple[dict[str, list[Edit]], dict[str, str]]:
    problems: list[str] = []
    edits: dict[str, list[Edit]] = {}
    for norm, readers in _norms(model, links):
        if f"{norm}.bias" in model.checkpoint.tensors:
            problems.append(f"{model.checkpoint.name}: {norm}.bias: a norm with a bias cannot be folded or rotated")
        for reader in readers:
            edits.setdefault(f"{reader.module}.weight", []).append(_fold(reader, f"{norm}.weight"))
        edits[f"{norm}.weight"] = [lambda value, _: torch.ones_like(value)]
    if problems:
        raise BadInput(problems)
    return edits, _untied(model)


def _norms(model: OpenedModel, links: Links) -> Iterable[tuple[str, list[Linear]]]:
    """Every norm on the residual stream by full name, and the linears that read it; the final norm last."""
    for layer in range(model.dimensions.layers):
        for norm, readers in links.norms:
            prefix = f"{model.family.layers}.{layer}"
            yield (
                f"{prefix}.{norm}",
                [_linear(model, f"{prefix}.{reader}") for reader in readers if _has(model, layer, reader)],
            )
    yield model.family.norm, [model.linears[-1]]


def _has(model: OpenedModel, layer: int, name: str) -> bool:
    """Whether a layer has a linear; one that is kept (Spark's head gate) may be switched off by the configuration."""
    module = model.family.module_of(name)
    return name not in model.family.kept or f"{model.family.layers}.{layer}.{module}.weight" in model.checkpoint.tensors


def _each_layer(model: OpenedModel, names: Sequence[str]) -> list[Linear]:
    layers = range(model.dimensions.layers)
    return [_linear(model, f"{model.family.layers}.{layer}.{name}") for layer in layers for name in names]


def _linear(model: OpenedModel, name: str) -> Linear:
    found = next((linear for linear in model.linears if linear.name == name), None)
    if found is not None:
        return found
    rows, columns = model.checkpoint.tensors[f"{name}.weight"].shape
    return Linear(name, int(name.split(".")[-3]), name, 0, rows, columns)


def _fold(reader: Linear, norm: str) -> Edit:
    def edit(value: torch.Tensor, read: Read) -> torch.Tensor:
        value[reader.start : reader.stop] *= read(norm)
        return value

    return edit


def _whole(change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda value, _: change(value)


def _by(factor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: value * factor.to(value.dtype)


def _on_rows(linear: Linear, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """Changes only the output channels that a linear has in its module."""

    def edit(value: torch.Tensor, _: Read) -> torch.Tensor:
        value[linear.start : linear.stop] = change(value[linear.start : linear.stop])
        return value

    return edit


def _write(
    model: OpenedModel,
    edits: dict[str, list[Edit]],
    writer: Linear,
    weight: Callable[[torch.Tensor], torch.Tensor],
    bias: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Changes a linear's output: its rows, and its bias where it has one."""
    edits.setdefault(f"{writer.module}.weight", []).append(_on_rows(writer, weight))
    if f"{writer.module}.bias" in model.checkpoint.tensors:
        edits.setdefault(f"{writer.module}.bias", []).append(_on_rows(writer, bias))


def _digest(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr(tuple(tensor.shape)).encode() + tensor.double().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]
