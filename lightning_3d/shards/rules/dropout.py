"""Dropout and random tensors like a shard: every rank draws for its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards.random import dropout_part, random_part
from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.rules.table import RuleTable
from lightning_3d.shards.tensor import ShardTensor

table = RuleTable()


@table.rule(F.dropout)
def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout of single elements."""
    assert isinstance(x, ShardTensor)
    if not training or not p:
        return x
    dropped = dropout_part(x._local, x._group, p, x._dim, x._segments, x.stride())
    if not inplace:
        return x.like(dropped, x._dim, x._segments)
    x._local.copy_(dropped)
    return x


@table.rule(torch.dropout)
def torch_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Dropout of single elements."""
    return dropout(x, p, train)


@table.rule(torch.dropout_)
def torch_dropout_in_place(x: Tensor, p: float, train: bool) -> Tensor:
    """Dropout of single elements, in place."""
    return dropout(x, p, train, inplace=True)


@table.rule(F.alpha_dropout)
def alpha_dropout(x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
    """Dropout of single elements that keeps mean and variance."""
    if inplace:
        raise Unshardable("alpha_dropout in place")
    return _random(x, F.alpha_dropout, p, training) if training and p else x


@table.rule(torch.bernoulli, Tensor.bernoulli)
def bernoulli(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Ones with the chances that are the elements."""
    if args or kwargs:
        raise Unshardable("bernoulli with a generator or with one chance for all")
    return _random(x, torch.bernoulli)


@table.rule(torch.rand_like)
def rand_like(x: Tensor, **kwargs: Any) -> Tensor:
    """Uniform random numbers in the shape of a tensor."""
    return _random(x, _with_options(torch.rand_like, kwargs))


@table.rule(torch.randn_like)
def randn_like(x: Tensor, **kwargs: Any) -> Tensor:
    """Normal random numbers in the shape of a tensor."""
    return _random(x, _with_options(torch.randn_like, kwargs))


def _random(x: Tensor, function: Callable[..., Tensor], *args: object) -> Tensor:
    assert isinstance(x, ShardTensor)
    if x._group.options.exact_random:
        raise Unshardable("random numbers of one device")
    return x.like(random_part(x._local, x._group, function, *args), x._dim, x._segments)


def _with_options(function: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    if not options:
        return function
    if "generator" in options:
        raise Unshardable("a generator")
    return lambda value: function(value, **options)
