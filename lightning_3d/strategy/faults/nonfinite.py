"""Losses and gradients that are not finite: one decision for all ranks, before an optimizer uses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.errors import NonFiniteError
from lightning_3d.gradients import local_gradients
from lightning_3d.log import get_logger
from lightning_3d.mesh.spec import MeshSpec

_log = get_logger(__name__)

NONE, RAISE = "none", "raise"


class FiniteCheck:
    """Looks at the loss and the gradients of each optimizer step.

    Args:
        policy: "skip" leaves a step out on every rank, "raise" ends the run on every rank, "none" looks at nothing.
        spec: The mesh, for what is said of a rank.
        group: All ranks.
        device: Where tensors must lie to be reduced.
    """

    def __init__(self, policy: str, spec: MeshSpec, group: dist.ProcessGroup, device: torch.device) -> None:
        self._policy, self._spec, self._group, self._device = policy, spec, group, device
        self._leaves_out = False

    @property
    def looks(self) -> bool:
        """Whether it looks at anything."""
        return self._policy != NONE

    def look(self, loss: Any, module: LightningModule, optimizer: Optimizer, *, gradients: bool = True) -> None:
        """Looks before hooks and clipping do, if it `looks`. A collective.

        Args:
            loss: What the closure has returned.
            module: The module, as this rank has it.
            optimizer: What steps some of its parameters next.
            gradients: Whether gradients count: under a loss scale they may overflow, and the scaler leaves out steps.

        Raises:
            NonFiniteError: On every rank, with the first rank and parameter, if the policy is "raise".
        """
        self._leaves_out = False
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        parameters = {name: each for name, each in module.named_parameters() if id(each) in stepped}
        found = self._found(loss, parameters if gradients else {})
        rank, world = self._group.rank(), self._group.size()
        first = torch.tensor(world if found is None else rank, device=self._device)
        if world > 1:
            dist.all_reduce(first, op=dist.ReduceOp.MIN, group=self._group)
        if int(first) == world:
            return
        told = [found]
        if world > 1:
            dist.broadcast_object_list(told, group_src=int(first), group=self._group)
        place = self._spec.coordinate(int(first))
        where = (
            f"rank {int(first)} (data rank {place.data}, pipeline rank {place.pipeline}, tensor rank {place.tensor})"
        )
        fact = f"{told[0]} is not finite in step {module.global_step}, first on {where}."
        if self._policy == RAISE:
            raise NonFiniteError(
                fact,
                fix="look at this batch, lower the learning rate or clip gradients; or go on without such steps: "
                'on_nonfinite="skip"',
            )
        self._leaves_out = True
        if rank == 0:
            _log.warning("%s The step is left out on every rank.", fact)

    def before_step(self, optimizer: Any) -> None:
        """After hooks and clipping: takes the gradients of a step that is left out, so that nothing is changed."""
        if self._leaves_out:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    @staticmethod
    def _found(loss: Any, parameters: Mapping[str, Tensor]) -> str | None:
        """What is not finite here, in words."""
        if isinstance(loss, Tensor) and not bool(torch.isfinite(loss.detach()).all()):
            return "the loss"
        named = {name: parameter for name, parameter in parameters.items() if parameter.grad is not None}
        gradients = local_gradients(named.values())
        if _all_finite(gradients):
            return None
        bad = next(name for name, gradient in zip(named, gradients, strict=True) if not _all_finite([gradient]))
        return f"the gradient of '{bad}'"


def _all_finite(gradients: list[Tensor]) -> bool:
    filled = [gradient for gradient in gradients if gradient.numel()]
    if not filled:
        return True
    largest = [each.to(filled[0].device) for each in torch._foreach_norm(filled, float("inf"))]
    return bool(torch.stack([each.float() for each in largest]).isfinite().all())
