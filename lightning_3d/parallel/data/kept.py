"""Units that stay gathered between the passes of an optimizer step: only a running pass sees their gathered copies."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_3d.parallel.data.door import ParameterGroup, as_module, groups_of
from lightning_3d.shards.writes import version_of

# FSDP2's name for a parameter of a unit, which it does not export.
UnitParameter = Any


class KeptUnits:
    """Shows forward and backward the gathered parameters of units, and everybody else what rests: the shards.

    The gathered copies stay in memory. One whose shard was written to meanwhile is let go, so that the next use gathers
    what was written; all ranks of the unit must have written, as operations on a DTensor do. Gradients that wait at
    gathered parameters stay there.

    Args:
        units: The units.
    """

    def __init__(self, units: Sequence[FSDPModule]) -> None:
        self._groups = {id(group): group for group in groups_of(units)}
        self._versions: dict[int, list[Hashable]] = {}

    def hide(self) -> None:
        """Puts the shards in place."""
        for key, group in self._groups.items():
            if group.is_unsharded and _is_shown(group):
                for parameter in group.fsdp_params:
                    _put(parameter, parameter.sharded_param)
                self._versions[key] = _versions(group)

    def show(self, units: Iterable[FSDPModule] | None = None) -> None:
        """Puts the gathered parameters in place.

        Args:
            units: Whose; None for all.
        """
        for group in self._groups.values() if units is None else groups_of(units):
            if group.is_unsharded and not _is_shown(group):
                for parameter in group.fsdp_params:
                    # FSDP2's own, which has a gathered parameter train as its shard does.
                    parameter.to_unsharded()

    def renew(self, *, gather: bool) -> None:
        """Lets gathered copies go whose shards were written to while they were hidden.

        Args:
            gather: Fetch them at once, for a backward that may not ask; a forward does.
        """
        for key, group in self._groups.items():
            if group.is_unsharded and not _is_shown(group) and self._versions.get(key) != _versions(group):
                group.reshard()
                if gather:
                    group.unshard()
                    group.wait_for_unshard()

    def show_when_called(self, units: Iterable[FSDPModule]) -> None:
        """Has each of the units be shown as soon as it is called.

        A step that reads a unit's parameters before has a gradient for them left when the unit's backward is through:
        they are freed by then and the gradients reduced. So it reads shards, and is told.
        """
        for unit in units:
            as_module(unit).register_forward_pre_hook(self._show_called)

    # A caller may be compiled, and would compile this.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _show_called(self, unit: nn.Module, inputs: Any) -> None:
        assert isinstance(unit, FSDPModule)
        self.show([unit])


def _is_shown(group: ParameterGroup) -> bool:
    """Whether the gathered parameters of a gathered unit are in place; all of them change places together."""
    parameter = group.fsdp_params[0]
    place = parameter._module_info
    shown: bool = place.module._parameters[place.param_name] is parameter._unsharded_param
    return shown


def _versions(group: ParameterGroup) -> list[Hashable]:
    return [version_of(parameter.sharded_param) for parameter in group.fsdp_params]


def _put(parameter: UnitParameter, form: nn.Parameter) -> None:
    """Puts one form of a parameter in all its places."""
    place = parameter._module_info
    place.module._parameters[place.param_name] = form
    for module, name in zip(place.shared_modules, place.shared_param_names, strict=True):
        module._parameters[name] = form
