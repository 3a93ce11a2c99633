"""Cross-entropy over classes that are cut over the ranks, on plain local logits that are never gathered.

A rank holds one run of the classes, the last rank perhaps a shorter one. Losses are replicated, and so are their
gradients; the gradient of local logits is their part of the whole gradient and needs no exchange.

After Shoeybi et al. 2019, "Megatron-LM", section 3 (the loss of the vocabulary-parallel output embedding).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_3d.shards.along import own_positions, pick
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import take
from lightning_3d.shards.nodes import reduce
from lightning_3d.shards.protocol import applied, one_call
from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.softmax import log_softmax

# Logits are widened a chunk of rows at a time: small beside the logits, yet few kernels.
_CHUNK_ROWS = 128
_MOST_CHUNKS = 16


@one_call
def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    group: ShardGroup,
    *,
    classes: int,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    wide: bool = False,
) -> Tensor:
    """Returns `torch.nn.functional.cross_entropy` of logits whose classes are cut.

    With class indices it takes one max and one sum over the ranks in the forward pass and nothing in the backward pass,
    keeps nothing of the size of the logits but them, and makes nothing of that size but their gradient.

    Args:
        logits: This rank's part, (rows, classes), (rows, classes, ...) or (classes); computed in 32 bits at least.
        targets: Class indices, replicated, of the shape without classes; or this rank's part of class probabilities.
        group: The ranks.
        classes: How many there are on all ranks.
        weight: Of all classes, replicated, without a gradient.
        ignore_index: Rows with this class index count nothing.
        reduction: ``none``, ``sum`` or ``mean``.
        label_smoothing: Share of the target that is spread over all classes, 0 to 1.
        wide: The result is as of logits that were widened to 32 bits before; their gradient keeps their own dtype.

    Raises:
        ValueError: ``reduction`` or ``label_smoothing`` is none of the valid values.
        IndexError: A class index is out of bounds. On an accelerator it is the kernel that fails, later.
        Unshardable: ``weight`` wants a gradient.
    """
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing} is not between 0.0 and 1.0")
    by_row = logits.movedim(_class_dim(logits), -1)
    shape = by_row.shape[:-1]
    rows = by_row.reshape(-1, by_row.shape[-1])
    weights = _class_weights(logits, weight, classes)
    if targets.is_floating_point():
        dtype = torch.promote_types(logits.dtype, targets.dtype)
        target_rows = targets.movedim(_class_dim(targets), -1).reshape(rows.shape)
        losses = _of_probabilities(rows, target_rows, group, weights, label_smoothing)
        divisor = losses.new_tensor(len(losses))
    else:
        dtype = logits.dtype
        losses, divisor = _of_classes(rows, targets.reshape(-1), group, weights, ignore_index, label_smoothing)
    return _reduced(losses.reshape(shape), divisor, reduction, _work_dtype(dtype) if wide else dtype)


@one_call
def nll_loss(
    log_probabilities: Tensor,
    targets: Tensor,
    group: ShardGroup,
    *,
    classes: int,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Returns `torch.nn.functional.nll_loss` of log-probabilities whose classes are cut, by one sum over the ranks.

    Args:
        log_probabilities: This rank's part, (rows, classes), (rows, classes, ...) or (classes).
        targets: Class indices, replicated, of the shape without classes.
        group: The ranks.
        classes: How many there are on all ranks.
        weight: Of all classes, replicated, without a gradient.
        ignore_index: Rows with this class index count nothing.
        reduction: ``none``, ``sum`` or ``mean``.

    Raises:
        ValueError: ``reduction`` is none of the valid values.
        IndexError: A class index is out of bounds. On an accelerator it is the kernel that fails, later.
        Unshardable: ``weight`` wants a gradient.
    """
    dim = _class_dim(log_probabilities)
    weights = _class_weights(log_probabilities, weight, classes)
    safe, ignored, row_weights = _row_weights(targets, weights, ignore_index)
    picked = pick(log_probabilities, group, dim, safe.unsqueeze(dim), len(weights)).squeeze(dim)
    losses = (-picked * row_weights).masked_fill(ignored, 0)
    return _reduced(losses, row_weights.sum(), reduction, log_probabilities.dtype)


def _of_classes(
    logits: Tensor, targets: Tensor, group: ShardGroup, weights: Tensor, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Losses of rows and what their mean divides by."""
    safe, ignored, row_weights = _row_weights(targets, weights, ignore_index)
    losses, spread = applied(_Surprise, logits, safe, group, len(weights), weights if smoothing else None)
    losses = losses * row_weights
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing / len(weights) * spread
    return losses.masked_fill(ignored, 0), row_weights.sum()


def _of_probabilities(logits: Tensor, targets: Tensor, group: ShardGroup, weights: Tensor, smoothing: float) -> Tensor:
    """Losses of rows. Their targets are as large as the logits, so that saving copies of the logits would not show."""
    smooth = targets * (1 - smoothing) + smoothing / len(weights)
    likelihoods = log_softmax(logits, group, 1, weights.dtype)
    return reduce(-(likelihoods * smooth * _own(weights, group)).sum(1), group)


def _row_weights(targets: Tensor, weights: Tensor, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Class indices without the ignored ones (0 instead), which those are, and the weight of each, 0 if ignored."""
    classes = targets.long()
    ignored = classes == ignore_index
    safe = classes.masked_fill(ignored, 0)
    # It is here that torch finds an index out of bounds: no rank holds it, so that none would see it later.
    row_weights = weights.index_select(0, safe.reshape(-1)).reshape(safe.shape)
    return safe, ignored, row_weights.masked_fill(ignored, 0)


def _class_weights(scores: Tensor, weight: Tensor | None, classes: int) -> Tensor:
    """The weights of all classes; views of a single one if there are none."""
    dtype = _work_dtype(scores.dtype)
    if weight is not None:
        if weight.requires_grad:
            raise Unshardable("class weights want a gradient")
        return weight.to(dtype)
    return torch.ones(1, dtype=dtype, device=scores.device).expand(classes)


def _own(weights: Tensor, group: ShardGroup) -> Tensor:
    return take(weights, 0, (len(weights),), group.rank, group.size)


def _reduced(losses: Tensor, divisor: Tensor, reduction: str, dtype: torch.dtype) -> Tensor:
    if reduction == "none":
        return losses.to(dtype)
    if reduction == "sum":
        return losses.sum().to(dtype)
    if reduction == "mean":
        return (losses.sum() / divisor).to(dtype)
    raise ValueError(f"{reduction} is not a valid value for reduction")


def _class_dim(logits: Tensor) -> int:
    return min(1, logits.dim() - 1)


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _chunks(rows: int) -> list[slice]:
    length = max(_CHUNK_ROWS, -(-rows // _MOST_CHUNKS))
    return [slice(start, start + length) for start in range(0, rows, length)]


class _Surprise(torch.autograd.Function):
    """-log p of each row's target; with class weights w also -sum_j w_j log p_j, for label smoothing.

    With m the largest logit of a row and S = sum_j exp(z_j - m), log p_j = (z_j - m) - log S. The gradient with respect
    to z_j of the first is p_j, less 1 at the target; of the second p_j sum_i w_i - w_j.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, group: ShardGroup, classes: int, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        rows = len(logits)
        largest = group.max(logits.amax(1).to(_work_dtype(logits.dtype)))
        positions, held = own_positions(targets, group, classes)
        own_weights = None if weights is None else _own(weights, group)
        parts = largest.new_empty((2 if own_weights is None else 3, rows))
        for chunk in _chunks(rows):
            shifted = logits[chunk] - largest[chunk, None]
            parts[1, chunk] = shifted.gather(1, positions[chunk, None]).squeeze(1)
            if own_weights is not None:
                parts[2, chunk] = (shifted * own_weights).sum(1)
            parts[0, chunk] = shifted.exp_().sum(1)
        parts[1].masked_fill_(~held, 0)
        powers, target, *weighted = group.sum(parts)
        ctx.save_for_backward(logits, targets, largest, powers, weights)
        ctx.group, ctx.classes = group, classes
        log = powers.log()
        return log - target, None if weights is None else weights.sum() * log - weighted[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, spread_gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, largest, powers, weights = ctx.saved_tensors
        positions, held = own_positions(targets, ctx.group, ctx.classes)
        hits = -gradient.masked_fill(~held, 0)
        scale = gradient if spread_gradient is None else gradient + spread_gradient * weights.sum()
        scale = scale / powers
        result = torch.empty_like(logits)
        for chunk in _chunks(len(logits)):
            slopes = (logits[chunk] - largest[chunk, None]).exp_().mul_(scale[chunk, None])
            slopes.scatter_add_(1, positions[chunk, None], hits[chunk, None])
            if spread_gradient is not None:
                slopes.addcmul_(spread_gradient[chunk, None], _own(weights, ctx.group), value=-1)
            result[chunk] = slopes
        return result, None, None, None, None
