"""Whole tensors: gathered from the ranks that hold parts, and sent along the pipeline axis to those without values."""

from __future__ import annotations

from collections import ChainMap, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.absent import is_absent
from lightning_3d.checkpoint.agreement import gather
from lightning_3d.checkpoint.layout import canonical, is_cut, module_state
from lightning_3d.checkpoint.packed import NO_LAYOUTS, packed
from lightning_3d.errors import CheckpointError
from lightning_3d.shards.alike import whole_shape
from lightning_3d.shards.held import gathered as joined
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.presence import Presence

Path: TypeAlias = tuple[Any, ...]


def gather_whole(
    value: Any,
    keep: bool,
    gathered: dict[int, Tensor | None],
    presence: Presence | None = None,
    *,
    required: bool = True,
) -> Any:
    """Returns ``value`` with every tensor in it whole and on CPU, one after the other.

    Args:
        value: A tensor, or dicts, lists and tuples that hold some; the same structure on every rank.
        keep: Whether this rank wants the tensors; others get None in their place.
        gathered: What is already whole, by identity, so that tied tensors stay one.
        presence: The ranks of the pipeline, which have each other's absent tensors.
        required: Some rank must have values of each tensor; else None stands in the place of those that none has.

    Raises:
        CheckpointError: On every rank of the pipeline, if none of them has values of a required tensor.
    """
    if presence is not None:
        gathered |= _sent(value, keep, gathered, presence, required=required)
    return _gathered(value, keep, gathered)


def full_state_dict(
    module: nn.Module,
    *,
    keep: bool,
    layouts: Mapping[str, Layout] = NO_LAYOUTS,
    presence: Presence | None = None,
) -> dict[str, Any]:
    """Returns the module's whole state dict on CPU, gathered tensor by tensor. Every rank calls it.

    Args:
        module: The module, sharded or not.
        keep: Whether this rank wants the result; others take part and get an empty dict.
        layouts: See ``layout.module_state``.
        presence: See :func:`gather_whole`.
    """
    state = with_other_state(module_state(module, layouts), module, presence)
    whole = gather_whole(state, keep, {}, presence)
    return whole if keep else {}


def with_other_state(state: dict[str, Any], module: nn.Module, presence: Presence | None) -> dict[str, Any]:
    """Returns a module's state whose extra state is that of the ranks that call its modules. A collective.

    Args:
        state: From ``layout.module_state``.
        module: The module. What is neither parameter nor buffer is extra state.
        presence: The ranks of the pipeline, None without one.
    """
    if presence is None:
        return state
    registered = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    known = {canonical(name) for name, _ in registered}
    others = {name: value for name, value in state.items() if name not in known}
    if not others:
        return state
    mine = {name: value for name, value in others.items() if presence.source(name) == presence.rank}
    return {**state, **ChainMap(*gather(presence.group, mine))}


@dataclass(frozen=True, slots=True)
class _Form:
    """Shape and dtype of a whole tensor."""

    shape: torch.Size
    dtype: torch.dtype


def gather_named(tensors: Mapping[str, Tensor], presence: Presence | None) -> dict[str, Tensor]:
    """Returns whole tensors on CPU by name, without those of which no rank has values.

    Args:
        tensors: As this rank holds them; on a pipeline under the same names on every rank, absent ones too.
        presence: See :func:`gather_whole`.
    """
    if presence is None:
        tensors = {name: tensor for name, tensor in tensors.items() if not is_absent(tensor)}
    found: dict[str, Tensor | None] = gather_whole(dict(tensors), True, {}, presence, required=False)
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _sent(
    value: Any, keep: bool, known: Mapping[int, Tensor | None], presence: Presence, *, required: bool
) -> dict[int, Tensor | None]:
    """Returns the tensors, by identity, that are absent on some rank, from the first rank that has each."""
    leaves: dict[Path, Tensor] = {}
    seen = set(known)
    for path, tensor in _tensors(value, ()):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            leaves[path] = tensor
    forms = {path: None if is_absent(leaf) else _Form(whole_shape(leaf), leaf.dtype) for path, leaf in leaves.items()}
    reports: list[tuple[bool, dict[Path, _Form | None]]] = gather(presence.group, (keep, forms))
    wanted = any(wants for wants, _ in reports)
    found: dict[int, Tensor | None] = {}
    for path in dict.fromkeys(path for _, known_forms in reports for path in known_forms):
        of_ranks = {rank: known_forms[path] for rank, (_, known_forms) in enumerate(reports) if path in known_forms}
        if None not in of_ranks.values():
            continue
        source, form = next(((rank, form) for rank, form in of_ranks.items() if form is not None), (0, None))
        if form is None and required:
            raise _nowhere(path)
        whole = None if form is None else _from(source, leaves.get(path), form, wanted, presence)
        if path in leaves:
            found[id(leaves[path])] = whole.cpu() if keep and whole is not None else None
    return found


def _from(source: int, leaf: Tensor | None, form: _Form, wanted: bool, presence: Presence) -> Tensor | None:
    """Returns a whole tensor from one rank of the pipeline; None if no rank wants it."""
    tensor: Tensor | None = None
    if source == presence.rank:
        assert leaf is not None, "it has been reported"
        # Its other parts are on ranks whose pipelines may want it, so these gather it in any case.
        # And not the tensor itself, to whose graph a collective is a change.
        tensor = _whole(leaf).to(presence.device).contiguous().data
    if not wanted:
        return None
    if tensor is None:
        tensor = torch.empty(form.shape, dtype=form.dtype, device=presence.device)
    if tensor.numel():
        # As bytes, since not every backend knows every dtype.
        dist.broadcast(tensor.reshape(-1).view(torch.uint8), group=presence.group, group_src=source)
    return tensor


def _nowhere(path: Path) -> CheckpointError:
    return CheckpointError(
        f"no rank has values of {'.'.join(map(str, path)) or 'the tensor'}: it is on the meta device",
        fix="put it on a device, or leave it out of the checkpoint",
    )


def _gathered(value: Any, keep: bool, known: dict[int, Tensor | None]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in known:
            whole = _whole(value)
            known[id(value)] = whole.cpu() if keep else None
        return known[id(value)]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _gathered(part, keep, known)) for key, part in value.items())
    if type(value) in (list, tuple):
        return type(value)(_gathered(part, keep, known) for part in value)
    return value


def _whole(tensor: Tensor) -> Tensor:
    """Returns the whole tensor where its mesh computes; all ranks of the mesh call it together."""
    local = packed(tensor.detach(), None)
    if not is_cut(local):
        whole: Tensor = local
        return whole
    # Offloaded shards lie on CPU while their group speaks the mesh's device.
    on_mesh: Any = local.to(local.device_mesh.device_type)
    joint: Tensor = joined(on_mesh) if isinstance(on_mesh, DTensor) else on_mesh.full_tensor()
    return joint


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif type(value) in (dict, OrderedDict):
        for key, part in value.items():
            yield from _tensors(part, (*path, key))
    elif type(value) in (list, tuple):
        for index, part in enumerate(value):
            yield from _tensors(part, (*path, index))
