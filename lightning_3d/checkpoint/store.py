"""Saving: a directory of torch.distributed.checkpoint, or one file that Lightning resumes on one device.

A directory holds the tensors as ``state_dict.<name>`` and ``optimizer_<i>.state.<name>.<key>`` by the names of the
unsplit module, and ``meta.pt`` with everything else in plain containers. A tied tensor is stored once. Lightning's own
``consolidate_checkpoint`` reads such a directory too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from torch import Tensor

from lightning_3d.checkpoint.absent import present
from lightning_3d.checkpoint.agreement import gather, group_rank, together
from lightning_3d.checkpoint.background import BackgroundWriter, staged
from lightning_3d.checkpoint.containers import Plain, to_plain
from lightning_3d.checkpoint.files import Disk, atomic_path, find_disk, is_remote, local_path
from lightning_3d.checkpoint.gathering import gather_whole
from lightning_3d.checkpoint.layout import as_saved
from lightning_3d.checkpoint.optimizers import group_names, indexed, split
from lightning_3d.checkpoint.packed import NO_LAYOUTS
from lightning_3d.checkpoint.remote import remote_folder, write_file
from lightning_3d.checkpoint.tensors import write_tensors
from lightning_3d.log import get_logger, info_on_first_rank
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.presence import Presence

FORMAT = 1
META_FILE = "meta.pt"
OURS = "lightning_3d"
MODULE_KEY = "state_dict"
OPTIMIZERS_KEY = "optimizer_states"

_log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """What one checkpoint holds, as this rank has it.

    Attributes:
        metadata: Everything of Lightning's checkpoint but the two below.
        module: From ``layout.module_state``, possibly edited by the user's hooks.
        optimizers: From ``optimizers.optimizer_state``, one each; None saves the weights alone.
        random: From ``generators.random_state``, or None.
        presence: The ranks of the pipeline, which have each other's absent tensors; None without one.
        places: Where the training loaders are, in plain containers.
        about: The mesh that saves it and the structure of the module, in plain containers.
        all_random: The random states of all ranks, where one process writes what several have saved.
    """

    metadata: Mapping[str, Any]
    module: Mapping[str, Any]
    optimizers: Sequence[Mapping[str, Any]] | None
    random: Mapping[str, Any] | None = None
    presence: Presence | None = None
    places: Sequence[Mapping[str, Any] | None] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    all_random: Sequence[Mapping[str, Any]] | None = None

    @classmethod
    def of(
        cls,
        checkpoint: Mapping[str, Any],
        random: Mapping[str, Any] | None = None,
        layouts: Mapping[str, Layout] = NO_LAYOUTS,
        presence: Presence | None = None,
        places: Sequence[Mapping[str, Any] | None] = (),
        about: Mapping[str, Any] | None = None,
    ) -> CheckpointState:
        """Returns the state that Lightning's ``dump_checkpoint`` collected.

        Args:
            checkpoint: The dict that ``Strategy.save_checkpoint`` gets; not changed.
            random: This rank's random states.
            layouts: From ``layout.every_name``: hooks may have put parameters themselves into the state dict, whose
                packed ones are turned back to their original order here.
            presence: The ranks of the pipeline, None without one.
            places: See the class.
            about: See the class.
        """
        metadata = {key: value for key, value in checkpoint.items() if key not in (MODULE_KEY, OPTIMIZERS_KEY)}
        return cls(
            metadata=metadata,
            module={name: as_saved(value, layouts.get(name)) for name, value in checkpoint.get(MODULE_KEY, {}).items()},
            optimizers=checkpoint.get(OPTIMIZERS_KEY),
            random=random,
            presence=presence,
            places=places,
            about=about or {},
        )


def save(
    path: str | Path,
    state: CheckpointState,
    *,
    distributed: bool,
    group: dist.ProcessGroup | None,
    writer: CheckpointIO | None = None,
    storage_options: Any = None,
    background: BackgroundWriter | None = None,
) -> None:
    """Saves a checkpoint; what stood under the name stays until the new one is whole. Every rank calls it.

    Where the ranks do not share the directory (node-local disks), each disk gets a complete checkpoint, gathered in the
    memory of the first rank there.

    Args:
        path: The name as this rank sees it: a local path, or a URL that fsspec knows.
        state: What to save.
        distributed: True for a directory that all ranks write, False for one file.
        group: All ranks of the mesh, with a backend for CPU objects; None for one process.
        writer: Gets the whole checkpoint on the first rank, in the place of all that is written here.
        storage_options: For the writer.
        background: Writes a directory later; until then the state may change.

    Raises:
        CheckpointError: On every rank alike, if any rank could not save, now or in the background before.
    """
    if writer is not None:
        _save_by(writer, str(path), state, group, storage_options=storage_options)
        return
    if is_remote(path) and distributed:
        # Every rank sees the same behind a URL.
        _save_directory(str(path), state, Disk(rank=group_rank(group), leader=0, leaders=(0,)), group, background)
        return
    if is_remote(path):
        _save_by(TorchCheckpointIO(), str(path), state, group)
        return
    target = local_path(path)
    disk = find_disk(target.parent, group)
    if not disk.shared:
        info_on_first_rank(
            _log, f"{target.parent} is {len(disk.leaders)} separate disks: each gets a complete checkpoint"
        )
    if distributed:
        _save_directory(target, state, disk, group, background)
    else:
        _save_file(target, state, disk, group)


def _save_directory(
    target: Path | str,
    state: CheckpointState,
    disk: Disk,
    group: dist.ProcessGroup | None,
    background: BackgroundWriter | None,
) -> None:
    parts = [split(optimizer, f"optimizer_{index}") for index, optimizer in enumerate(state.optimizers or ())]
    aliases, module, extra = _untied(state.module)
    nested = {MODULE_KEY: module} | {f"optimizer_{index}": tensors for index, (_, tensors) in enumerate(parts)}
    kept = None if state.optimizers is None else [rest for rest, _ in parts]
    meta = _meta(target, state, kept, extra, disk.leads, group)
    if disk.shared:
        nested = {key: present(tensors) for key, tensors in nested.items()}
    else:
        nested = gather_whole(nested, disk.leads, {}, state.presence)
    nested = {key: tensors for key, tensors in nested.items() if tensors}
    packed = BytesIO()
    if disk.leads:
        torch.save(meta, packed)
    if background is not None:
        background.wait()
        nested = staged(nested)

    def write(writers: dist.ProcessGroup | None) -> None:
        if isinstance(target, str):
            with remote_folder(target, writers) as folder:
                write_tensors(folder, nested, aliases, writers)
                if disk.leads:
                    write_file(f"{folder}/{META_FILE}", packed.getvalue())
            return
        with atomic_path(target, disk, writers, directory=True) as temporary:
            if disk.shared or disk.leads:
                write_tensors(temporary, nested, aliases, writers if disk.shared else None)
            if disk.leads:
                (temporary / META_FILE).write_bytes(packed.getbuffer())

    if background is None:
        write(group)
    else:
        background.write(write)


def _save_file(target: Path, state: CheckpointState, disk: Disk, group: dist.ProcessGroup | None) -> None:
    checkpoint = whole_checkpoint(target, state, disk.leads, group)
    with atomic_path(target, disk, group, directory=False) as temporary:
        if disk.leads:
            torch.save(checkpoint, temporary)


def _save_by(
    writer: CheckpointIO, url: str, state: CheckpointState, group: dist.ProcessGroup | None, **options: Any
) -> None:
    first = group is None or dist.get_rank(group) == 0
    checkpoint = whole_checkpoint(url, state, first, group)
    with together(group, f"write the checkpoint {url}", "check the address and its permissions, then save again"):
        if first:
            writer.save_checkpoint(checkpoint, url, **options)


def whole_checkpoint(
    target: str | Path, state: CheckpointState, keep: bool, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Returns what plain Lightning would write, with our notes beside it. Every rank calls it.

    Args:
        target: Its name, for errors.
        state: What to save.
        keep: Whether this rank wants it; others get its metadata.
        group: All ranks, None for one process.
    """
    optimizers = None if state.optimizers is None else [indexed(optimizer) for optimizer in state.optimizers]
    names = None if state.optimizers is None else [group_names(optimizer) for optimizer in state.optimizers]
    _, _, extra = _untied(state.module)
    meta = _meta(target, state, names, extra, keep, group)
    gathered: dict[int, Tensor | None] = {}
    module = gather_whole(dict(state.module), keep, gathered, state.presence)
    whole = {MODULE_KEY: module | meta[OURS]["extra"][0] if keep else {}}
    if optimizers is not None:
        whole[OPTIMIZERS_KEY] = gather_whole(optimizers, keep, gathered, state.presence)
    return meta | whole


def _meta(
    target: str | Path,
    state: CheckpointState,
    optimizers: Any,
    extra: Mapping[str, Any],
    keep: bool,
    group: dist.ProcessGroup | None,
) -> dict[str, Any]:
    """Returns the metadata in plain containers, ours under one key; every rank agrees that it can be saved."""
    random = gather(group, state.random)
    metadata = gather_whole(dict(state.metadata), keep, {}, state.presence)
    with together(group, f"save the metadata of {target}", "store plain data"):
        plain = to_plain(metadata)
        ours = {
            "format": FORMAT,
            "notes": plain.notes,
            "optimizers": _pair(to_plain(optimizers, OPTIMIZERS_KEY)),
            "extra": _pair(to_plain(dict(extra), MODULE_KEY)),
            "random": random if state.random is not None else state.all_random,
            "places": _pair(to_plain(list(state.places), "places")),
            "about": to_plain(dict(state.about), "about").value,
        }
    return {**plain.value, OURS: ours}


def _pair(plain: Plain) -> tuple[Any, Any]:
    return plain.value, plain.notes


def _untied(state: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Tensor], dict[str, Any]]:
    """Splits a module's state into aliases, its tensors once each, and the rest (extra state of modules)."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            extra[name] = value
        elif first.setdefault(id(value), name) == name:
            tensors[name] = value
        else:
            aliases[f"{MODULE_KEY}.{name}"] = f"{MODULE_KEY}.{first[id(value)]}"
    return aliases, tensors, extra
