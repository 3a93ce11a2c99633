"""Gradients of parameters that live on several pipeline ranks: summed, so that each of them has the whole one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_3d.mesh.spec import PIPELINE_AXIS


@dataclass(frozen=True, kw_only=True, slots=True)
class _Holders:
    """Parameters that the same ranks hold, and those ranks."""

    group: dist.ProcessGroup
    parameters: tuple[nn.Parameter, ...]


class SharedGradients:
    """Sums the gradients of shared parameters over the pipeline ranks that hold them. Making it is a collective call.

    A tied embedding has a part of its gradient where tokens are looked up, and another where they are predicted.

    Args:
        parameters: All parameters of the module in their final form, by first names; absent ones are not looked at.
        holders: The pipeline ranks of each parameter that lives on more than one, by first names, equal on all ranks.
        mesh: The whole mesh.
        device: This rank's device, on which its groups can reduce.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        holders: Mapping[str, tuple[int, ...]],
        mesh: DeviceMesh,
        *,
        device: torch.device,
    ) -> None:
        self._device = device
        self._shared: list[_Holders] = []
        own = dist.get_rank()
        for ranks in sorted(set(holders.values())):
            names = sorted(name for name in holders if holders[name] == ranks)
            group = _group_of(ranks, mesh)
            if group is not None and own in dist.get_process_group_ranks(group):
                present = tuple(parameters[name] for name in names)
                _assert_alike(names, present, group, device)
                self._shared.append(_Holders(group=group, parameters=present))

    @property
    def holders(self) -> Mapping[Tensor, int]:
        """On how many pipeline ranks each shared parameter of this one lies."""
        return {parameter: shared.group.size() for shared in self._shared for parameter in shared.parameters}

    def sum(self) -> None:
        """Sums them: once for each optimizer step, after the gradients have met over the data axis.

        A rank without a gradient for one of them counts as zero; where none has one, none appears.
        """
        for shared in self._shared:
            trained = [parameter for parameter in shared.parameters if parameter.requires_grad]
            if not trained:
                continue
            found = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
            found = found.to(self._device)
            dist.all_reduce(found, group=shared.group)
            used = [parameter for parameter, count in zip(trained, found.tolist(), strict=True) if count]
            _sum_together([_local_gradient(parameter) for parameter in used], shared.group, self._device)


def _group_of(ranks: Sequence[int], mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The group of some pipeline ranks that this rank belongs to; every rank of the mesh takes part in making it."""
    assert mesh.mesh_dim_names is not None
    dim = mesh.mesh_dim_names.index(PIPELINE_AXIS)
    if len(ranks) == mesh.size(dim):
        return mesh.get_group(PIPELINE_AXIS)
    rows = mesh.mesh.movedim(dim, -1).flatten(0, -2)[:, list(ranks)]
    own: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(rows.tolist())[0]
    return own


def _sum_together(gradients: Sequence[Tensor], group: dist.ProcessGroup, device: torch.device) -> None:
    """Sums tensors in place, those of one dtype in one call."""
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        of_dtype = [gradient for gradient in gradients if gradient.dtype == dtype]
        only = of_dtype[0]
        if len(of_dtype) == 1 and only.is_contiguous() and only.device == device:
            dist.all_reduce(only, group=group)
            continue
        together = torch.cat([gradient.flatten().to(device) for gradient in of_dtype])
        dist.all_reduce(together, group=group)
        for gradient, total in zip(of_dtype, together.split([gradient.numel() for gradient in of_dtype]), strict=True):
            gradient.copy_(total.view_as(gradient))


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of a gradient, which is made if there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter, requires_grad=False)
    gradient = parameter.grad
    with torch.no_grad():
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient.detach()


def _assert_alike(
    names: Sequence[str], parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, device: torch.device
) -> None:
    """All holders cut the parameters in the same way, so that their local parts are of the same elements."""
    found = ascii([(name, _form(parameter)) for name, parameter in zip(names, parameters, strict=True)])
    digest = int.from_bytes(hashlib.blake2b(found.encode(), digest_size=7).digest(), "little")
    extremes = torch.tensor([digest, -digest], device=device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    assert extremes.sum() == 0, f"the holders of shared parameters cut them alike; this one has {found}"


def _form(parameter: nn.Parameter) -> tuple[object, ...]:
    if not isinstance(parameter, DTensor):
        return tuple(parameter.shape), str(parameter.dtype)
    dims = parameter.device_mesh.mesh_dim_names
    return (
        tuple(parameter.shape),
        str(parameter.dtype),
        dims,
        str(parameter.placements),
        tuple(parameter.to_local().shape),
    )
