"""Activation checkpointing: what a block keeps for backward, and what it computes again there.

"full" keeps the inputs of each block (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"). "selective"
keeps the products with weights and computes the rest again, the core of attention above all, which takes much memory
and little computation (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models",
section 5). Products that the tensor axis sums are partial results, whole on every rank and of no use once they are
summed: they are computed again. Key-value caches, which nobody reads in training, are not filled: they would keep what
is computed again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lightning_3d.graph.calls import Call, Handler
from lightning_3d.parallel.tensor.doors import BlockDoor, Run, Through
from lightning_3d.parallel.tensor.replay.caches import is_any_cache
from lightning_3d.shards.group import ShardGroup

_CONVOLUTION = torch.ops.aten.convolution.default
_KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        _CONVOLUTION,
    }
)


def recomputing(kind: str, group: ShardGroup | None = None) -> Through | None:
    """Returns what runs a call and computes it again in backward; None for the kind "none".

    Args:
        kind: "none", "selective" or "full".
        group: The tensor axis; it knows which products are partial results.
    """
    if kind == "none":
        return None
    contexts = None if kind == "full" else partial(create_selective_checkpoint_contexts, partial(_policy, group))
    return partial(_checkpointed, contexts)


def around_block(call: Call, door: BlockDoor | None, through: Through) -> Any:
    """Makes a call of a block that is computed again in backward; the tensor axis' door stands outside of that."""
    if door is not None:
        return door.around(call, through)
    return through(lambda args, kwargs: call.function(*args, **kwargs), call.args, call.kwargs)


def block_handler(door: BlockDoor | None, through: Through | None) -> Handler | None:
    """Returns what stands directly around a block, outside of its hooks; None if nothing does.

    Args:
        door: The block's door on the tensor axis.
        through: Activation checkpointing.
    """
    if through is None:
        return None if door is None else door.around
    return lambda call: around_block(call, door, through)


def _checkpointed(
    contexts: Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]] | None,
    run: Run,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if not torch.is_grad_enabled():
        return run(args, kwargs)
    spare = partial(_with_spare_caches, run)
    if contexts is None:
        return checkpoint(spare, args, kwargs, use_reentrant=False)
    return checkpoint(spare, args, kwargs, use_reentrant=False, context_fn=contexts)


def _with_spare_caches(run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes the call, forward and again in backward, on copies of its caches, which are dropped."""
    args, kwargs = pytree.tree_map(_spare, (args, kwargs), is_leaf=is_any_cache)
    return run(args, kwargs)


def _spare(value: Any) -> Any:
    """Returns a copy of a cache that may be filled in its place; anything else as it is."""
    if not is_any_cache(value):
        return value
    spare = copy.copy(value)
    for name, part in vars(value).items():
        if isinstance(part, list):
            vars(spare)[name] = [copy.copy(layer) for layer in part]
        elif isinstance(part, dict):
            vars(spare)[name] = dict(part)
        else:
            vars(spare)[name] = _spare(part)
    return spare


def is_kept(operation: Any) -> bool:
    """Returns whether "selective" keeps what an operation gives."""
    return operation in _KEPT


def is_kept_product(name: str) -> bool:
    """Returns whether "selective" keeps what an operation of this name gives, such as "aten.mm"."""
    return any(name == str(kept._overloadpacket) for kept in _KEPT)


def _policy(
    group: ShardGroup | None, context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if not is_kept(operation) or (group is not None and _is_partial(group, operation, args)):
        return CheckpointPolicy.PREFER_RECOMPUTE
    return CheckpointPolicy.MUST_SAVE


def _is_partial(group: ShardGroup, operation: Any, args: tuple[Any, ...]) -> bool:
    """Whether a product is one by a weight whose products are summed; while something compiles nobody knows."""
    weight = args[-1]
    known = isinstance(weight, FakeTensor) or type(weight) in (Tensor, nn.Parameter)
    return operation is not _CONVOLUTION and known and group.sums(weight)
