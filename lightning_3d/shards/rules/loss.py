"""Losses: over classes that are cut, and element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards import loss
from lightning_3d.shards.late import scores
from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.rules.autocast import autocasts, widened_by_autocast
from lightning_3d.shards.rules.pointwise import own_operand
from lightning_3d.shards.rules.table import RuleTable
from lightning_3d.shards.tensor import ShardTensor

table = RuleTable()

_ELEMENTWISE = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss)
_ELEMENTWISE_OF_CHANCES = (F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div)


@table.rule(F.cross_entropy)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy of logits whose classes are cut."""
    shard = _classes_cut("cross_entropy", logits, size_average, reduce)
    _refuse_class_weights("cross_entropy", weight)
    own_target = target
    if target.is_floating_point():
        own_target = own_operand(target, shard)
    elif isinstance(target, ShardTensor):
        raise Unshardable("cross_entropy with class indices that are cut")
    local = scores(shard)
    return loss.cross_entropy(
        local,
        own_target,
        shard._group,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        wide=local.dtype != shard.dtype or autocasts(local),
        classes=shard.size(shard._dim),
    )


@table.rule(F.nll_loss)
def nll_loss(
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Negative log-likelihood of classes that are cut."""
    shard = _classes_cut("nll_loss", log_probabilities, size_average, reduce)
    _refuse_class_weights("nll_loss", weight)
    if isinstance(target, ShardTensor):
        raise Unshardable("nll_loss with class indices that are cut")
    return loss.nll_loss(
        widened_by_autocast(shard._local),
        target,
        shard._group,
        weight=weight,
        ignore_index=ignore_index,
        reduction=reduction,
        classes=shard.size(shard._dim),
    )


def _classes_cut(name: str, x: Tensor, size_average: bool | None, reduce: bool | None) -> ShardTensor:
    """The scores, if they are cut along their classes in one run for each rank."""
    if size_average is not None or reduce is not None:
        raise Unshardable(f"{name} with size_average or reduce")
    if not isinstance(x, ShardTensor) or x._dim != min(1, x.dim() - 1):
        raise Unshardable(f"{name} of scores that are not cut along their classes")
    if len(x._segments) > 1:
        raise Unshardable(f"{name} of classes that are cut in several segments")
    return x


def _refuse_class_weights(name: str, weight: Tensor | None) -> None:
    if weight is not None and (weight.requires_grad or isinstance(weight, ShardTensor)):
        raise Unshardable(f"{name} with class weights that learn or are cut")


def _element_by_element(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes the rule of a loss that is a mean or sum over elements."""

    def rule(
        x: Tensor,
        target: Tensor,
        size_average: bool | None = None,
        reduce: bool | None = None,
        reduction: str = "mean",
        **options: Any,
    ) -> Tensor:
        for name in ("weight", "pos_weight"):
            if options.get(name) is not None:
                raise Unshardable(f"{function.__name__} with {name}")
        if size_average is not None or reduce is not None:
            raise Unshardable(f"{function.__name__} with size_average or reduce")
        shard = x if isinstance(x, ShardTensor) else target
        assert isinstance(shard, ShardTensor)
        if x.shape != target.shape:
            raise Unshardable(f"{function.__name__} of tensors of two shapes")
        own = (own_operand(each, shard) for each in (x, target))
        losses = shard.like(function(*own, reduction="none", **options), shard._dim, shard._segments)
        if reduction == "none":
            return losses
        if reduction == "batchmean":
            return losses.sum() / x.shape[0]
        return losses.sum() if reduction == "sum" else losses.mean()

    return rule


for _function in (*_ELEMENTWISE, *_ELEMENTWISE_OF_CHANCES):
    table.add(_function, _element_by_element(_function))
