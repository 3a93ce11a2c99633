"""Gradient hooks that some ranks have and others have not: loggers set them on rank 0, to watch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.checkpoint.agreement import gather
from lightning_3d.shards.tensor import ShardTensor


def share_gradient_hooks(module: nn.Module, group: dist.ProcessGroup) -> frozenset[str]:
    """Makes gradient hooks harmless that only some ranks have: no other rank would answer what they compute of shards.

    They see this rank's part of the gradient as a plain tensor and cannot change it. The other ranks treat these
    parameters alike. Hooks that all ranks have are left as they are. A collective.

    Args:
        module: The whole module, before its parameters are cut.
        group: All ranks.

    Returns:
        The names of the parameters with such hooks.
    """
    mine = frozenset(name for name, parameter in module.named_parameters() if parameter._backward_hooks)
    ranks: list[frozenset[str]] = gather(group, mine)
    uneven = frozenset().union(*ranks) - frozenset.intersection(*ranks)
    for name in sorted(uneven):
        parameter = module.get_parameter(name)
        if name not in mine:
            parameter.register_hook(_nothing)
            continue
        hooks = parameter._backward_hooks
        assert hooks is not None
        for key, hook in list(hooks.items()):
            hooks[key] = partial(_on_part, hook)
    return uneven


def _on_part(hook: Callable[[Tensor], object], gradient: Tensor) -> None:
    hook(gradient._local if isinstance(gradient, ShardTensor) else gradient)


def _nothing(gradient: Tensor) -> None:
    """Stands where another rank has a hook."""
