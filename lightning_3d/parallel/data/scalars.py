"""Parameters without dims, which cannot be cut: whole on every rank, their gradients averaged beside the units'."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def scalar_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of a module that have no dims, such as a learned temperature, each once."""
    return [parameter for parameter in module.parameters() if parameter.dim() == 0]


def move_scalars(module: nn.Module, device: torch.device) -> None:
    """Moves scalar parameters to the device; units move only what they manage."""
    for parameter in scalar_parameters(module):
        if parameter.device != device and not parameter.is_meta:
            parameter.data = parameter.data.to(device)


class ScalarGradients:
    """Averages the gradients of scalar parameters over the data axis, all of them at once.

    Args:
        parameters: The same ones on every rank.
        mesh: The data axis, replicas x shards for hybrid sharding.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
        self._parameters = parameters
        self._groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
        self._ranks = mesh.size()

    def average(self) -> None:
        """Averages what has gathered since the last optimizer step; a collective call if there are parameters."""
        trained = [parameter for parameter in self._parameters if parameter.requires_grad]
        if not trained:
            return
        values = torch.stack([_gradient(parameter) for parameter in trained]).double()
        # Where no rank has a gradient, none must appear.
        holders = torch.tensor([float(p.grad is not None) for p in trained]).to(values)
        both = torch.stack([values, holders])
        for group in self._groups:
            dist.all_reduce(both, group=group)
        averages = both[0] / self._ranks
        for parameter, average, held in zip(trained, averages, both[1].tolist(), strict=True):
            if held:
                parameter.grad = _like(parameter, average.to(parameter.dtype))


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient in the dtype of the parameter, plain; zero if there is none."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to(parameter.dtype)
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """A value as the parameter is: replicated over the tensor axis, if there is one."""
    if not isinstance(parameter, DTensor):
        return value
    return DTensor.from_local(value, parameter.device_mesh, parameter.placements, run_check=False)
