"""Gradient hooks of parameters that FSDP2 replaces by shards: they go on with the gathered parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_3d.graph.parameters import refuse_accumulation_hooks
from lightning_3d.parallel.data.door import groups_of
from lightning_3d.parallel.data.kept import UnitParameter

Hooks = tuple[Any, ...]


class GradientHooks:
    """The gradient hooks that the parameters of a module have before they are sharded.

    Args:
        module: The module.

    Raises:
        ModuleError: A hook waits for an accumulated gradient, which no rank has whole.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hooks: dict[str, Hooks] = {}
        for name, parameter in module.named_parameters():
            refuse_accumulation_hooks(name, parameter)
            if parameter._backward_hooks:
                self._hooks[name] = tuple(parameter._backward_hooks.values())

    def carry(self, units: Iterable[FSDPModule]) -> None:
        """Has the hooks run in the backward of each data rank, on its own whole gradient, before ranks reduce.

        Args:
            units: The units that the module was sharded in.
        """
        if not self._hooks:
            return
        parameters = dict(self._module.named_parameters())
        hooks: Mapping[int, Hooks] = {id(parameters[name]): held for name, held in self._hooks.items()}
        for group in groups_of(units):
            for parameter in group.fsdp_params:
                held = hooks.get(id(parameter.sharded_param))
                if held is not None:
                    _hook_when_gathered(parameter, held)


def _hook_when_gathered(parameter: UnitParameter, hooks: Hooks) -> None:
    """FSDP2 makes the gathered parameter when it gathers first, and keeps it."""
    make = parameter.init_unsharded_param

    def make_hooked() -> None:
        make()
        del parameter.__dict__["init_unsharded_param"]
        gathered = parameter._unsharded_param
        trains = gathered.requires_grad
        # Torch takes no hook for what does not train now; it may later.
        gathered.requires_grad_()
        for hook in hooks:
            gathered.register_hook(hook)
        gathered.requires_grad_(trains)

    parameter.init_unsharded_param = make_hooked
