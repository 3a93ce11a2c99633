"""What a module's tensors are called in a checkpoint, and how whole tensors and shards become each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.absent import stand_in
from lightning_3d.checkpoint.packed import NO_LAYOUTS, PackedTensor, packed
from lightning_3d.shards.layout import Layout

# Wrappers that other libraries put around a module; a checkpoint does not know of them.
_WRAPPER_NAMES = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def canonical(name: str) -> str:
    """Returns a tensor's name without the wrappers of torch.compile and activation checkpointing."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPER_NAMES)


def module_state(module: nn.Module, layouts: Mapping[str, Layout] = NO_LAYOUTS) -> dict[str, Any]:
    """Returns the module's state dict by canonical names, as this rank holds it: DTensors stay shards.

    Names of one tied parameter map to one object. AbsentTensors stand for parameters on the meta device.

    Args:
        module: The module; its own ``state_dict`` decides what belongs to the state.
        layouts: How the tensor axis cuts packed parameters, by a canonical name of each; they come as PackedTensors.
    """
    reshard(module)
    owner, layouts = _owners(module), every_name(module, layouts)
    own = {canonical(name): value for name, value in module.state_dict().items()}
    state = {name: as_saved(value, layouts.get(name)) for name, value in own.items()}
    return {name: state.get(owner.get(name, name), value) for name, value in state.items()}


def module_tensors(module: nn.Module, layouts: Mapping[str, Layout] = NO_LAYOUTS) -> dict[str, Tensor]:
    """Returns all tensors that a checkpoint of the module may fill, by canonical name.

    Args:
        module: The module. Tensors that its ``state_dict`` leaves out are here too.
        layouts: See :func:`module_state`.
    """
    state = {name: value for name, value in module_state(module, layouts).items() if isinstance(value, Tensor)}
    layouts = every_name(module, layouts)
    return {name: as_saved(tensor.detach(), layouts.get(name)) for name, tensor in _named_tensors(module)} | state


def as_saved(value: Any, layout: Layout | None) -> Any:
    """Returns what stands in a state for a tensor of a module.

    Args:
        value: The tensor; anything else comes back as it is.
        layout: How the tensor axis cuts it, None if it does not.
    """
    return stand_in(packed(value, layout))


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Returns every parameter's canonical name, a tied one's first.

    Args:
        module: The module; it is brought to its sharded state, in which optimizers know its parameters.
    """
    reshard(module)
    return {parameter: canonical(name) for name, parameter in module.named_parameters()}


def named_parameters(module: nn.Module, layouts: Mapping[str, Layout] = NO_LAYOUTS) -> dict[str, Tensor]:
    """Returns what stands for every parameter in a checkpoint, by canonical name, a tied one once.

    Args:
        module: See :func:`parameter_names`.
        layouts: See :func:`module_state`.
    """
    layouts = every_name(module, layouts)
    return {name: packed(parameter, layouts.get(name)) for parameter, name in parameter_names(module).items()}


def every_name(module: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Returns the layouts by all names that their parameters have.

    Args:
        module: The module.
        layouts: By a name of each parameter, whichever of a tied one's.
    """
    owner = _owners(module)
    by_name = {canonical(name): layout for name, layout in layouts.items()}
    of_owner = {owner.get(name, name): layout for name, layout in by_name.items()}
    return {name: of_owner[first] for name, first in owner.items() if first in of_owner}


def reshard(module: nn.Module) -> None:
    """Frees gathered parameters, so that the module's parameters are its shards."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def empty_like(target: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an uninitialised tensor laid out as ``target``, of its own kind."""
    return torch.empty_like(target.detach(), dtype=dtype)


def laid_out(source: Tensor, target: Tensor) -> Tensor:
    """Returns ``source`` as a new tensor laid out as ``target``; a whole source is cut without communication.

    Args:
        source: A DTensor or PackedTensor laid out as ``target``, or the whole tensor, the same on every rank.
        target: A tensor of the same global shape.
    """
    if is_cut(source):
        return source
    filled = empty_like(target, source.dtype)
    fill(filled, source)
    return filled


def fill(target: Tensor, whole: Tensor) -> None:
    """Writes this rank's part of a whole tensor into ``target``, without communication.

    Args:
        target: A DTensor, PackedTensor or whole tensor of the same global shape; written in place, in its own dtype.
        whole: The whole tensor, the same on every rank.
    """
    if not is_cut(target):
        target.copy_(whole)
        return
    # The protocol of torch.distributed.checkpoint for sharded tensors: which chunks of the whole does this rank hold?
    pieces: Any = target
    for chunk in pieces.__create_chunk_list__():
        local = pieces.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
        part = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        local.copy_(whole[part])


def is_cut(value: object) -> TypeGuard[DTensor | PackedTensor]:
    """Returns whether a value is one rank's part of a tensor that a whole mesh holds."""
    return isinstance(value, DTensor | PackedTensor)


def _owners(module: nn.Module) -> dict[str, str]:
    """Returns the first name of every tensor by each of its names."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in _named_tensors(module)}


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield canonical(name), parameter
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in part._non_persistent_buffers_set:
                yield canonical(name), buffer
