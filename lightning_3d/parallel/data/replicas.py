"""Hybrid sharding from ZeRO 2 on: what one of FSDP2's units keeps until the replicas meet."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.fsdp import FSDPModule

from lightning_3d.errors import ModuleError
from lightning_3d.graph.parameters import class_name
from lightning_3d.parallel.data.door import as_module, groups_of


def check_replicas_met(units: Iterable[FSDPModule]) -> None:
    """Finds gradients that an optimizer step would miss.

    The sum over the shards' ranks waits in a unit for the backward of the last micro-batch. FSDP2 leaves it there if
    that one has no gradient for the unit.

    Args:
        units: The units, after the last backward.

    Raises:
        ModuleError: A unit still keeps gradients.
    """
    for unit in units:
        if any(group._partial_reduce_output is not None for group in groups_of([unit])):
            raise ModuleError(
                f"a {class_name(as_module(unit))} got gradients in some micro-batches of an optimizer step, but none "
                "in the last one; with replicas and zero_stage 2 or 3 they would be lost.",
                valid="modules that each micro-batch uses, or none",
                fix="zero_stage=1 or data_replicate_size=1",
            )
