"""Applying tensor layouts to a module: every parameter becomes a DTensor of the tensor axis, in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from torch._prims_common import make_contiguous_strides_for as contiguous_strides
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_3d.graph.parameters import marks_kept, refuse_accumulation_hooks
from lightning_3d.parallel.tensor.reading.aliases import Place, find_aliases
from lightning_3d.parallel.tensor.reading.leaves import Activity, ClassKey, Hook, Reading, Slot, swap_class
from lightning_3d.parallel.tensor.reading.state import TensorState
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import Layout


def apply_tensor(
    module: nn.Module,
    layouts: Mapping[str, Layout],
    mesh: DeviceMesh,
    group: ShardGroup,
    *,
    device: torch.device,
    partial: Collection[str] = (),
    absent: Collection[str] = (),
) -> TensorState:
    """Turns a whole module in place into this tensor rank's part of it.

    Parameters with a layout are cut, the others replicated; all become DTensors, whose names, ties, ``requires_grad``
    and attributes stay. The part of a packed one holds this rank's rows of each segment, so that what torch takes for
    the whole is in the order of the ranks; where parts are uneven, the last one is padded with zeros at its end. What
    is on the meta device stays there.

    Args:
        module: The whole module, with equal values on all tensor ranks.
        layouts: How parameters are cut, by their first names.
        mesh: The tensor axis.
        group: The same ranks, for what is computed.
        device: This rank's device, where parts go.
        partial: First names of replicated parameters that are used on parts only: their gradients are summed once for
            each optimizer step instead of at each use. A name that is not right costs nothing but a division.
        absent: First names of parameters that other pipeline ranks hold; they stay as they are.

    Raises:
        ModuleError: A parameter has a hook that waits for its accumulated gradient, which is never whole.
    """
    owned = _owned(module)
    assert set(layouts) <= {parameter.names[0] for parameter in owned.values()}, "layouts go by first names"
    owned = {key: parameter for key, parameter in owned.items() if parameter.names[0] not in absent}
    places = {key: parameter.places[0] for key, parameter in owned.items()}
    aliases = {child: find_aliases(child, places) for child in module.modules()}
    slots: dict[nn.Module, dict[str, Slot]] = {}
    with marks_kept(module), torch.no_grad():
        for parameter in owned.values():
            reading = _reading(parameter, layouts.get(parameter.names[0]), partial)
            slot = Slot(reading, group)
            part = _part(parameter.places[0].parameter, reading, mesh, group, device)
            for place in parameter.places:
                place.module._parameters[place.name] = part
                slots.setdefault(place.module, {})[place.name] = slot
    activity, known = Activity(group), dict[ClassKey, type]()
    for child, held in aliases.items():
        if child in slots or held:
            swap_class(child, slots.get(child, {}), held, activity, known)
    return TensorState(module, group, activity, device=device)


@dataclass(kw_only=True, slots=True)
class _Owned:
    """A parameter's names and places, in module order."""

    names: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)


def _owned(module: nn.Module) -> dict[int, _Owned]:
    """Every parameter once, by its identity."""
    found: dict[int, _Owned] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):
        for key, parameter in child._parameters.items():
            if parameter is not None:
                known = found.setdefault(id(parameter), _Owned())
                known.names.append(f"{prefix}.{key}" if prefix else key)
                known.places.append(Place(child, key))
    return found


def _reading(parameter: _Owned, layout: Layout | None, partial: Collection[str]) -> Reading:
    name, whole = parameter.names[0], parameter.places[0].parameter
    refuse_accumulation_hooks(name, whole)
    hooks: tuple[Hook, ...] = tuple((whole._backward_hooks or {}).values())
    # A hook must see a whole gradient.
    return Reading(layout=layout, partial=name in partial and layout is None and not hooks, hooks=hooks)


def _part(
    whole: nn.Parameter, reading: Reading, mesh: DeviceMesh, group: ShardGroup, device: torch.device
) -> nn.Parameter:
    """This rank's part of a parameter, on memory of its own if it is cut."""
    local, shape, layout = whole.detach(), [*whole.shape], reading.layout
    if layout is not None:
        assert layout.fits(group.size, padded=True), f"{layout} does not fit {group.size} ranks"
        own = layout.part(local, group.rank, group.size)
        local = layout.padded(own, group.size).clone(memory_format=torch.contiguous_format)
        shape[layout.dim] = layout.padded_length(group.size) * group.size
    elif not local.is_contiguous():
        local = local.contiguous()
    if not local.is_meta:
        local = local.to(device)
    cut = DTensor.from_local(
        local, mesh, [reading.placement], run_check=False, shape=torch.Size(shape), stride=contiguous_strides(shape)
    )
    return nn.Parameter(cut, requires_grad=whole.requires_grad)
