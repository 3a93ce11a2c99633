"""Optimizer state by parameter name: taken out, split into tensors and the rest, and put back.

torch's own functions for this make state that is not there yet by a step with zero gradients. That counts as a step,
and a parameter without state cannot be loaded; so state is taken and given exactly as ``Optimizer.state_dict`` has it.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import Replicate, empty
from torch.optim import Optimizer

from lightning_3d.checkpoint.absent import AbsentTensor
from lightning_3d.checkpoint.agreement import gather
from lightning_3d.checkpoint.layout import empty_like, is_cut, laid_out, named_parameters
from lightning_3d.checkpoint.members import Members, all_members, names_of
from lightning_3d.checkpoint.packed import NO_LAYOUTS, PackedTensor, check_free, packed_like, unpacked
from lightning_3d.checkpoint.stored import StoredTensor
from lightning_3d.errors import CheckpointError, few
from lightning_3d.shards.absent import form_of
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.presence import Presence

# Names of an optimizer's parameters, group by group.
GroupNames: TypeAlias = Sequence[Sequence[str]]

_TENSOR = "__tensor__"


def optimizer_state(
    module: nn.Module,
    optimizer: Optimizer,
    layouts: Mapping[str, Layout] = NO_LAYOUTS,
    *,
    presence: Presence | None = None,
    recorded: Sequence[Members] = (),
) -> dict[str, Any]:
    """Returns the optimizer's state dict with parameter names in the place of torch's indices.

    Args:
        module: The module whose parameters it steps.
        optimizer: A torch optimizer. Its state is not touched, nor made where there is none yet.
        layouts: See ``layout.module_state``; state of a packed parameter comes as PackedTensors too.
        presence: The ranks of the pipeline, which then call this together; None without one.
        recorded: See ``members.all_members``.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{"params": [name, ...], ...}]}``, DTensors as shards, AbsentTensors
        for the state of other pipeline ranks.

    Raises:
        CheckpointError: It steps a parameter that the module does not have, or keeps state of a packed one in a form
            that has no original order.
    """
    names = names_of(module, optimizer)
    parameters = named_parameters(module, layouts)
    state = named(optimizer.state_dict(), names)
    own = _each_tensor(state["state"], lambda value, name: packed_like(value, parameters.get(name), name))
    everyone = all_members(module, optimizer, presence, recorded)
    groups = [members.group(options) for members, options in zip(everyone, state["param_groups"], strict=True)]
    found = own if presence is None else _with_absent(own, presence)
    # One order on every rank: torch keeps the order in which state was first made.
    ordered = {name: found[name] for group in everyone for name in group.names if name in found} | found
    return {**state, "state": ordered, "param_groups": groups}


def indexed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state by names in torch's own form: by index, in the order of the parameter groups.

    Args:
        state: From :func:`optimizer_state`.
    """
    index = {name: number for number, name in enumerate(_flat(group_names(state)))}
    groups = [{**group, "params": [index[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {index.get(name, name): value for name, value in state["state"].items()}, "param_groups": groups}


def named(state: Mapping[str, Any], names: GroupNames) -> dict[str, Any]:
    """Returns torch's own form with names in the place of the indices.

    Args:
        state: An optimizer's state dict, by index.
        names: The parameters' names, group by group, as many as the state has indices.
    """
    name = dict(zip(_flat(group_names(state)), _flat(names), strict=True))
    groups = [{**group, "params": list(own)} for group, own in zip(state["param_groups"], names, strict=True)]
    return {"state": {name.get(index, index): value for index, value in state["state"].items()}, "param_groups": groups}


def group_names(state: Mapping[str, Any]) -> list[list[Any]]:
    """Returns the parameters of a state, group by group: names or indices."""
    return [list(group["params"]) for group in state["param_groups"]]


def split(state: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Splits a state by names into its tensors and all the rest.

    Args:
        state: From :func:`optimizer_state`.
        prefix: The optimizer's name in the checkpoint.

    Returns:
        The state with a reference in the place of each tensor, and the tensors by ``state.<name>.<key>``.
    """
    tensors: dict[str, Tensor] = {}

    def kept(value: Any, place: str) -> Any:
        if isinstance(value, Tensor):
            tensors[place] = value
            cut = value.cut if isinstance(value, AbsentTensor | StoredTensor) else is_cut(value)
            return {_TENSOR: f"{prefix}.{place}", "distributed": cut}
        if isinstance(value, Mapping):
            return {key: kept(part, f"{place}.{key}") for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(kept(part, f"{place}.{index}") for index, part in enumerate(value))
        return value

    return {"state": kept(state["state"], "state"), "param_groups": state["param_groups"]}, tensors


def destinations(
    state: Mapping[str, Any], parameters: Mapping[str, Tensor], stored: Mapping[str, TensorStorageMetadata]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns a split state with tensors to read into, and those tensors by flat name.

    Args:
        state: From :func:`split`, for names in ``parameters``.
        parameters: From ``layout.named_parameters``.
        stored: What the checkpoint holds.
    """
    into: dict[str, Tensor] = {}

    def made(value: Any, owner: str) -> Any:
        if isinstance(value, Mapping) and _TENSOR in value:
            name = value[_TENSOR]
            if name not in stored:
                raise CheckpointError(f"the checkpoint has no tensor {name}", fix="load another one, this is damaged")
            entry = stored[name]
            parameter = parameters.get(owner)
            into[name] = _destination(owner, parameter, entry.size, entry.properties.dtype, value["distributed"])
            return into[name]
        return _mapped(value, lambda part: made(part, owner))

    return {**state, "state": {name: made(value, name) for name, value in state["state"].items()}}, into


def joined(state: Mapping[str, Any], tensor: Callable[[str, bool], Tensor]) -> dict[str, Any]:
    """Returns a split state with tensors in the place of the references.

    Args:
        state: From :func:`split`.
        tensor: Makes one from its flat name, and from whether ranks held parts of it.
    """

    def made(value: Any) -> Any:
        if isinstance(value, Mapping) and _TENSOR in value:
            return tensor(value[_TENSOR], bool(value["distributed"]))
        return _mapped(value, made)

    return {**state, "state": {name: made(value) for name, value in state["state"].items()}}


def cut(state: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> dict[str, Any]:
    """Returns a state of whole tensors with each tensor laid out as this rank's parameter is.

    Args:
        state: A state by names with whole tensors, the same on every rank.
        parameters: From ``layout.named_parameters``.
    """

    def made(value: Tensor, owner: str) -> Tensor:
        target = _destination(owner, parameters.get(owner), value.shape, value.dtype, value.dim() > 0)
        return laid_out(value, target)

    return {**state, "state": _each_tensor(state["state"], made)}


def matched(
    state: Mapping[str, Any], members: Sequence[Members], held: Sequence[Members], where: str
) -> dict[str, Any]:
    """Returns a state by names arranged as the optimizer's groups are, whatever order it was saved in.

    Args:
        state: The saved state by names.
        members: The groups of the optimizer that will take it, of all parameters that it steps.
        held: Its groups on this rank.
        where: The optimizer's name, for errors.

    Returns:
        The state of the parameters that the optimizer holds.

    Raises:
        CheckpointError: The optimizer has other parameters, or groups that the saved ones do not map to.
    """
    mine: GroupNames = [group.names for group in members]
    saved = group_names(state)
    if set(_flat(mine)) != set(_flat(saved)) and [len(names) for names in mine] == [len(names) for names in saved]:
        # Parameters were renamed since; torch matches by order, and so does this.
        state, saved = named(indexed(state), mine), [list(names) for names in mine]
    _check_names(_flat(mine), _flat(saved), where)
    group_of = {name: number for number, names in enumerate(saved) for name in names}
    groups = []
    for number, names in enumerate(mine):
        sources = {group_of[name] for name in names} or {number}
        if len(sources) > 1 or not sources <= set(range(len(saved))):
            raise CheckpointError(
                f"parameter group {number} of {where} holds parameters of the saved groups {sorted(sources)}",
                valid=f"{len(saved)} groups as they were saved, of {[len(names) for names in saved]} parameters",
                fix="make the same parameter groups in configure_optimizers, or start a new run from the weights alone",
            )
        groups.append(held[number].group(state["param_groups"][sources.pop()]))
    elsewhere = {*_flat(mine)} - {name for group in held for name in group.names}
    states = {name: value for name, value in state["state"].items() if name not in elsewhere}
    return {"state": states, "param_groups": groups}


def load_state(state: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Gives a matched state by names, laid out for this rank, to the optimizer."""
    shards = _each_tensor(state["state"], lambda value, _: unpacked(value))
    optimizer.load_state_dict(indexed({**state, "state": shards}))


def _with_absent(own: Mapping[str, Any], presence: Presence) -> dict[str, Any]:
    """Returns states by name with the forms of those that other pipeline ranks have. A collective."""
    forms = _each_tensor(own, lambda value, _: AbsentTensor(form_of(value), cut=is_cut(value)))
    return {**ChainMap(dict(own), *gather(presence.group, forms))}


def _check_names(mine: Sequence[str], saved: Sequence[str], where: str) -> None:
    of_mine, of_saved = set(mine), set(saved)
    absent = [name for name in mine if name not in of_saved]
    strange = [name for name in saved if name not in of_mine]
    if absent or strange:
        parts = [f"{len(absent)} without saved state ({few(absent)})"] if absent else []
        parts += [f"{len(strange)} saved ones that it does not step ({few(strange)})"] if strange else []
        raise CheckpointError(
            f"{where} steps other parameters than the saved one: {', '.join(parts)}",
            fix="freeze and group parameters as in the saved run, or start a new run from the weights alone",
        )


def _destination(
    owner: str, parameter: Tensor | None, size: torch.Size, dtype: torch.dtype, distributed: bool
) -> Tensor:
    if parameter is None or not is_cut(parameter) or len(size) == 0:
        return torch.empty(size, dtype=dtype)
    if size == parameter.shape:
        return empty_like(parameter, dtype)
    if isinstance(parameter, PackedTensor):
        check_free(size, parameter, owner)
    if distributed:
        mesh = parameter.device_mesh
        return empty(*size, dtype=dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
    return torch.empty(size, dtype=dtype)


def _each_tensor(states: Mapping[str, Any], convert: Callable[[Tensor, str], Tensor]) -> dict[str, Any]:
    """Returns states by parameter name with ``convert(tensor, name)`` in the place of every tensor."""

    def converted(value: Any, owner: str) -> Any:
        if isinstance(value, Tensor):
            return convert(value, owner)
        return _mapped(value, lambda part: converted(part, owner))

    return {name: converted(value, name) for name, value in states.items()}


def _mapped(value: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(value, Mapping):
        return {key: convert(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(convert(part) for part in value)
    return value


def _flat(groups: Sequence[Sequence[Any]]) -> list[Any]:
    return [name for group in groups for name in group]
