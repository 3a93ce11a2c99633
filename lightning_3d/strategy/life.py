"""A module's life on a mesh: what is refused before it is touched, and what it has become afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_3d.errors import ModuleError
from lightning_3d.parallel.data.apply import DataEngine
from lightning_3d.plan import Plan

_WRAPPERS = (DistributedDataParallel, FullyShardedDataParallel)


@dataclass(frozen=True, slots=True)
class AppliedModule:
    """A module after its plan was applied.

    Attributes:
        module: The module itself; its parameters are this rank's part.
        plan: The plan that was applied.
        engine: Runs its steps.
    """

    module: LightningModule
    plan: Plan
    engine: DataEngine


def check_untouched(module: nn.Module) -> None:
    """Refuses a module that something has cut or wrapped already.

    Raises:
        ModuleError: Names the sub-module or parameter, and the call to remove.
    """
    for name, child in module.named_modules():
        shown = name or type(module).__name__
        if isinstance(child, FSDPModule):
            raise ModuleError(
                f"'{shown}' is sharded already, by fully_shard or by a strategy of an earlier Trainer.",
                fix="remove the fully_shard call, or load the earlier Trainer's checkpoint into a new module",
            )
        if isinstance(child, _WRAPPERS):
            raise ModuleError(
                f"'{shown}' is wrapped in {type(child).__name__}.", fix=f"remove the {type(child).__name__}(...) call"
            )
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ModuleError(
                f"parameter '{name}' is a DTensor already: {parameter.placements}.",
                fix="remove the parallelize_module or distribute_tensor call from configure_model",
            )


def check_optimizers(module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers that hold parameters which are no longer the module's, or share some.

    Raises:
        ModuleError: Says which optimizer, and how many parameters.
    """
    known = {id(parameter) for parameter in module.parameters()}
    owner: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        of_optimizer = optimizer_parameters([optimizer])
        stale = sum(id(parameter) not in known for parameter in of_optimizer)
        if stale:
            raise ModuleError(
                f"optimizer {index} ({type(optimizer).__name__}) holds {stale} parameters that are not the module's: "
                "it was made before they were sharded.",
                fix="make optimizers inside configure_optimizers, from self.parameters()",
            )
        shared = {owner.setdefault(id(parameter), index) for parameter in of_optimizer} - {index}
        if shared:
            raise ModuleError(
                f"optimizers {min(shared)} and {index} share parameters.", fix="give each parameter to one optimizer"
            )


def optimizer_parameters(optimizers: Sequence[Optimizer]) -> list[Tensor]:
    """Returns the parameters of some optimizers, each once, in order."""
    found: dict[int, Tensor] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                found[id(parameter)] = parameter
    return list(found.values())
