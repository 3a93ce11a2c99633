"""What is in a checkpoint, whoever wrote it, as the state that a save takes; its tensors stay on the disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from lightning import __version__ as lightning_version
from torch import Tensor

from lightning_3d.checkpoint.files import resolve
from lightning_3d.checkpoint.foreign import optimizer_states
from lightning_3d.checkpoint.huggingface import HuggingFaceTensors, is_huggingface
from lightning_3d.checkpoint.layout import canonical
from lightning_3d.checkpoint.optimizers import group_names, joined, named
from lightning_3d.checkpoint.pretrained import open_weights
from lightning_3d.checkpoint.restore import StoredCheckpoint, open_checkpoint
from lightning_3d.checkpoint.sources import DirectoryTensors, MappedTensors
from lightning_3d.checkpoint.store import META_FILE, MODULE_KEY, OURS, CheckpointState
from lightning_3d.checkpoint.stored import StoredTensor
from lightning_3d.convert.progress import Counted, Progress
from lightning_3d.errors import CheckpointError

_DIRECT = "resume from it as it is: trainer.fit(ckpt_path=FILE) on the mesh; or convert the weights: --weights-only"


class Kind(Enum):
    """Who wrote a checkpoint."""

    MESH = "a directory of lightning_3d"
    SHARDED = "a directory of Lightning's ModelParallelStrategy or FSDPStrategy"
    FILE = "one torch file"
    HUGGING_FACE = "safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """A checkpoint whose tensors are StoredTensors.

    Attributes:
        path: Where it lies.
        kind: Who wrote it.
        state: What it holds.
    """

    path: Path
    kind: Kind
    state: CheckpointState


def read_contents(path: Path, progress: Progress, *, weights_only: bool, names: bool) -> Contents:
    """Opens any checkpoint, without reading its tensors and without running any code of it.

    Args:
        path: Of lightning_3d, of Lightning or of Hugging Face.
        progress: Is told what is read later.
        weights_only: Leave out optimizers.
        names: The names of the parameters that optimizers step are needed.

    Raises:
        CheckpointError: It is none, is damaged, or holds more than plain data.
    """
    path = resolve(path)
    if (path / ".metadata").is_file():
        return _of_directory(path, progress, weights_only)
    if is_huggingface(path):
        return _of_huggingface(path, progress)
    if path.is_dir():
        # It has no weights: called for the error that says so.
        open_weights(path)
    return _of_file(path, progress, weights_only, names)


def _of_huggingface(path: Path, progress: Progress) -> Contents:
    source = Counted(HuggingFaceTensors(path), progress)
    module = {name: StoredTensor(source, name) for name in source.forms}
    metadata = {"epoch": 0, "global_step": 0, "pytorch-lightning_version": lightning_version}
    state = CheckpointState(metadata=metadata, module=module, optimizers=None)
    return Contents(path=path, kind=Kind.HUGGING_FACE, state=state)


def _of_directory(path: Path, progress: Progress, weights_only: bool) -> Contents:
    stored = open_checkpoint(path, weights_only=True, group=None)
    directory = DirectoryTensors(path)
    source = Counted(directory, progress)
    weights = open_weights(path)
    ours = OURS in torch.load(path / META_FILE, map_location="cpu", weights_only=True)

    def tensor(flat: str, cut: bool | None = None) -> StoredTensor:
        form = source.forms[flat]
        return StoredTensor(source, flat, len(form.shape) > 0 if cut is None else cut)

    owners = {flat: tensor(flat) for flat in weights.names.values() if flat not in source.ties}
    module = {canonical(name): owners[source.ties.get(flat, flat)] for name, flat in weights.names.items()}
    found: list[dict[str, Any]] | None = None
    if not weights_only and not ours:
        found = optimizer_states(directory, tensor) or None
    elif not weights_only and stored.optimizers is not None:
        found = [joined(state, tensor) for state in stored.optimizers]
    state = _state(stored, module, found)
    return Contents(path=path, kind=Kind.MESH if ours else Kind.SHARDED, state=state)


def _of_file(path: Path, progress: Progress, weights_only: bool, names: bool) -> Contents:
    stored = open_checkpoint(path, weights_only=True, group=None)
    tensors: dict[str, Tensor] = {}
    states = [_noted(state, f"optimizer_{at}", tensors) for at, state in enumerate(stored.optimizers or ())]
    whole = {canonical(name): value for name, value in (stored.whole or {}).items()}
    tensors |= {f"{MODULE_KEY}.{name}": value for name, value in whole.items() if isinstance(value, Tensor)}
    source = Counted(MappedTensors(path, tensors), progress)
    objects: dict[str, StoredTensor] = {}

    def lazy(name: str) -> StoredTensor:
        owner = source.ties.get(name, name)
        return objects.setdefault(owner, StoredTensor(source, owner, tensors[owner].dim() > 0))

    module = {n: lazy(f"{MODULE_KEY}.{n}") if isinstance(v, Tensor) else v for n, v in whole.items()}
    optimizers = None if stored.optimizers is None else [_with(state, lazy) for state in states]
    if weights_only:
        optimizers = None
    elif names and optimizers is not None:
        known = stored.optimizer_names or [_guessed(path, at, each, module) for at, each in enumerate(optimizers)]
        optimizers = [named(state, own) for state, own in zip(optimizers, known, strict=True)]
    return Contents(path=path, kind=Kind.FILE, state=_state(stored, module, optimizers))


def _state(
    stored: StoredCheckpoint, module: Mapping[str, Any], optimizers: list[dict[str, Any]] | None
) -> CheckpointState:
    return CheckpointState(
        metadata=stored.metadata,
        module={**module, **stored.extra},
        optimizers=optimizers,
        places=stored.places,
        all_random=stored.random,
        about=stored.about or {},
    )


def _guessed(path: Path, at: int, state: Mapping[str, Any], module: Mapping[str, Any]) -> list[list[str]]:
    """Returns the names of an optimizer's parameters in a file that holds none: possible if they are all tensors.

    Lightning and torch number parameters in the order of the module, which is that of the state dict as well.
    """
    first: dict[int, str] = {}
    for name, value in module.items():
        if isinstance(value, Tensor):
            first.setdefault(id(value), name)
    names = [*first.values()]
    groups = group_names(state)
    indices = [index for group in groups for index in group]
    shapes = {
        index: {value.shape for value in state["state"].get(index, {}).values() if isinstance(value, Tensor)}
        for index in indices
    }
    fits = (
        len(groups) == 1
        and len(names) == len(indices)
        and all(
            all(len(shape) == 0 or shape == module[name].shape for shape in shapes[index])
            for name, index in zip(names, indices, strict=True)
        )
    )
    if not fits:
        raise CheckpointError(
            f"optimizer {at} of {path} steps {len(indices)} parameters without names, in {len(groups)} groups, and the "
            f"module has {len(names)} tensors: which is which cannot be told without the module",
            fix=_DIRECT,
        )
    return [names]


def _noted(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """Returns nested containers with a name in the place of each tensor, which is noted under it."""
    if isinstance(value, Tensor):
        tensors[place] = value
        return _Name(place)
    if isinstance(value, Mapping):
        return {key: _noted(part, f"{place}.{key}", tensors) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_noted(part, f"{place}.{at}", tensors) for at, part in enumerate(value))
    return value


class _Name(str):
    """Where a tensor stood."""


def _with(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    if isinstance(value, _Name):
        return tensor(str(value))
    if isinstance(value, Mapping):
        return {key: _with(part, tensor) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with(part, tensor) for part in value)
    return value
