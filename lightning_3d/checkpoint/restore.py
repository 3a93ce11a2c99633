"""Loading: our directories and files, or a file of plain Lightning, into a module as this rank holds it."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import CheckpointIO, TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from lightning_3d.checkpoint.absent import present
from lightning_3d.checkpoint.agreement import together
from lightning_3d.checkpoint.containers import from_plain
from lightning_3d.checkpoint.files import is_remote, local_path, resolve
from lightning_3d.checkpoint.generators import set_random_state
from lightning_3d.checkpoint.layout import canonical, empty_like, module_tensors, named_parameters
from lightning_3d.checkpoint.members import Members, all_members, members_of
from lightning_3d.checkpoint.optimizers import cut, destinations, load_state, matched, named
from lightning_3d.checkpoint.packed import NO_LAYOUTS
from lightning_3d.checkpoint.remote import finished_folder, read_file
from lightning_3d.checkpoint.report import LoadedPart
from lightning_3d.checkpoint.store import FORMAT, META_FILE, MODULE_KEY, OPTIMIZERS_KEY, OURS
from lightning_3d.checkpoint.tensors import read_tensors, stored_tensors
from lightning_3d.checkpoint.weights import load_module_state
from lightning_3d.errors import CheckpointError
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.presence import Presence

_DAMAGED = "load another checkpoint, this one is damaged"
_OF_MODULE = f"{MODULE_KEY}."


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCheckpoint:
    """An opened checkpoint: its metadata in memory, its tensors still on the disk.

    Attributes:
        path: Where it lies.
        metadata: Lightning's checkpoint without ``state_dict`` and ``optimizer_states``, in its original containers.
        optimizers: For a directory, states by names with references to tensors; for a file, states of torch's own form
            with tensors mapped from the disk. None if only weights were saved.
        optimizer_names: For one of our files, the parameters' names by optimizer and group.
        extra: The module's extra state that is not tensors.
        random: The random states of each rank, or None.
        places: Where the training loaders were.
        tensors: For a directory, what it holds by flat name; None for a file.
        whole: For a file, the module's state; None for a directory.
        about: The mesh that saved it and the structure of its module, in plain containers; empty if it does not say,
            None for a checkpoint that is not ours.
    """

    path: Path | str
    metadata: dict[str, Any]
    optimizers: list[dict[str, Any]] | None
    optimizer_names: list[list[list[str]]] | None
    extra: dict[str, Any]
    random: list[dict[str, Any]] | None
    places: list[Any]
    tensors: dict[str, TensorStorageMetadata] | None
    whole: dict[str, Any] | None
    about: Mapping[str, Any] | None = None

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of the module's tensors."""
        if self.tensors is None:
            whole = self.whole or {}
            return {canonical(name): value.dtype for name, value in whole.items() if isinstance(value, Tensor)}
        of_module = ((name, entry) for name, entry in self.tensors.items() if name.startswith(_OF_MODULE))
        return {name.removeprefix(_OF_MODULE): entry.properties.dtype for name, entry in of_module}

    @property
    def form(self) -> str:
        """What it is, in words."""
        return "a directory" if self.tensors is not None else "a file"


def open_checkpoint(
    path: str | Path,
    *,
    weights_only: bool | None,
    group: dist.ProcessGroup | None,
    reader: CheckpointIO | None = None,
) -> StoredCheckpoint:
    """Opens a checkpoint and reads its metadata. Every rank calls it.

    Args:
        path: The checkpoint as this rank sees it: a directory or a file, or the URL of one.
        weights_only: None and True load plain data alone; False unpickles a file of someone trusted.
        group: The ranks that load together, None for one process.
        reader: Reads whatever is no directory of ours.

    Raises:
        CheckpointError: On every rank: the path does not exist, is unfinished or damaged, or needs unpickling.
    """
    plain = weights_only is not False
    with together(group, f"open the checkpoint {path}", _DAMAGED):
        remote = is_remote(path)
        folder = finished_folder(str(path)) if remote and reader is None else None
        if folder is not None:
            return _open_folder(folder, plain)
        if remote or (reader is not None and not (local_path(path) / META_FILE).is_file()):
            return _of_file(str(path), (reader or TorchCheckpointIO()).load_checkpoint(path, weights_only=plain))
        return _open_local(resolve(local_path(path)), plain)
    raise AssertionError("together() lets no failure through")


def read_module_state(
    stored: StoredCheckpoint,
    module: nn.Module,
    *,
    group: dist.ProcessGroup | None,
    layouts: Mapping[str, Layout] = NO_LAYOUTS,
) -> dict[str, Any]:
    """Reads the module's state as this rank needs it, for hooks that edit it before it is loaded.

    Args:
        stored: An opened checkpoint.
        module: The module it is meant for: tensors with its names and shapes come laid out as its own, absent ones as
            AbsentTensors, others whole.
        group: The ranks that load together, None for one process.
        layouts: See ``layout.module_state``.

    Raises:
        CheckpointError: On every rank, if any rank could not read.
    """
    if stored.whole is not None:
        return {canonical(name): value for name, value in stored.whole.items()} | stored.extra
    targets = module_tensors(module, layouts)
    state: dict[str, Tensor] = {}
    for flat, entry in (stored.tensors or {}).items():
        name = flat.removeprefix(_OF_MODULE)
        if flat.startswith(_OF_MODULE):
            target = targets.get(name)
            fits = target is not None and target.shape == entry.size
            state[name] = empty_like(targets[name], targets[name].dtype) if fits else _empty(entry)
    into = {f"{_OF_MODULE}{name}": tensor for name, tensor in present(state).items()}
    read_tensors(stored.path, into, group)
    return state | stored.extra


def load_module(
    stored: StoredCheckpoint,
    module: nn.Module,
    *,
    strict: bool,
    group: dist.ProcessGroup | None,
    layouts: Mapping[str, Layout] = NO_LAYOUTS,
    presence: Presence | None = None,
) -> None:
    """Loads the weights; see :func:`read_module_state` and :func:`load_module_state`. Every rank calls it."""
    state = read_module_state(stored, module, group=group, layouts=layouts)
    load_module_state(module, state, strict=strict, layouts=layouts, presence=presence)


def load_optimizers(
    stored: StoredCheckpoint,
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    group: dist.ProcessGroup | None,
    layouts: Mapping[str, Layout] = NO_LAYOUTS,
    presence: Presence | None = None,
    recorded: Sequence[Sequence[Members]] | None = None,
) -> list[LoadedPart]:
    """Loads the states of all optimizers by parameter name, and returns what became of each. Every rank calls it.

    Args:
        stored: An opened checkpoint.
        module: The module, as its optimizers know it.
        optimizers: In the order of ``configure_optimizers``.
        group: The ranks that load together, None for one process.
        layouts: See ``layout.module_state``.
        presence: The ranks of the pipeline, None without one.
        recorded: See ``members.all_members``, for each optimizer.

    Raises:
        CheckpointError: Only weights were saved, or another number of optimizers, parameters or groups.
    """
    kept = _optimizers_of(stored, len(optimizers))
    everyone = [
        all_members(module, optimizer, presence, known)
        for optimizer, known in zip(optimizers, recorded or [()] * len(optimizers), strict=True)
    ]
    into: dict[str, Tensor] = {}
    with together(group, f"match the optimizers of {stored.path}", _DAMAGED):
        states = [
            matched(_by_name(stored, index, members), members, members_of(module, optimizer), f"optimizer {index}")
            for index, (optimizer, members) in enumerate(zip(optimizers, everyone, strict=True))
        ]
        parameters = named_parameters(module, layouts)
        if stored.tensors is None:
            states = [cut(state, parameters) for state in states]
        else:
            placed = [destinations(state, parameters, stored.tensors) for state in states]
            into = {name: tensor for _, tensors in placed for name, tensor in tensors.items()}
            states = [state for state, _ in placed]
    if stored.tensors is not None:
        read_tensors(stored.path, into, group)
    for optimizer, state in zip(optimizers, states, strict=True):
        load_state(state, optimizer)
    everything = zip(optimizers, kept, everyone, strict=True)
    return [
        _optimizer_part(f"optimizer {index} ({type(optimizer).__name__})", saved, members)
        for index, (optimizer, saved, members) in enumerate(everything)
    ]


def restore_random(stored: StoredCheckpoint, *, rank: int, world: int, device: torch.device) -> None:
    """Puts this rank's random states back; those of the first rank, if another number of ranks saved them.

    Args:
        stored: An opened checkpoint.
        rank: This process' rank.
        world: How many ranks there are now.
        device: The device this rank computes on.
    """
    if stored.random is None:
        return
    # Other ranks begin where the first one was: as in a new run, all draw alike until their data differ.
    same = len(stored.random) == world
    set_random_state(stored.random[rank if same else 0], device)


def random_part(stored: StoredCheckpoint, world: int) -> LoadedPart:
    """Returns what :func:`restore_random` does on so many ranks."""
    saved, name = stored.random, "random states"
    if saved is None:
        return LoadedPart(name=name, missing=("those of all ranks",))
    if len(saved) == world:
        return LoadedPart(name=name, restored=(f"of {world} ranks",))
    everywhere = f" on all {world} ranks" if world > 1 else ""
    return LoadedPart(name=name, converted=(f"rank 0's of {len(saved)}{everywhere}",))


def _optimizers_of(stored: StoredCheckpoint, configured: int) -> Sequence[Mapping[str, Any]]:
    """Returns the saved states of so many optimizers."""
    if stored.optimizers is None and any(name.startswith("optimizer_") for name in stored.tensors or ()):
        raise CheckpointError(
            f"{stored.path} keeps its optimizers in the form of Lightning's own sharding strategies",
            fix=f"lightning-3d convert {stored.path} OUT --to mesh, then ckpt_path=OUT",
        )
    if stored.optimizers is None:
        raise CheckpointError(
            f"{stored.path} holds weights but no optimizer state, so training cannot be resumed from it",
            fix="save with ModelCheckpoint(save_weights_only=False), or load its weights alone and start a new run",
        )
    if len(stored.optimizers) != configured:
        raise CheckpointError(
            f"{stored.path} holds {len(stored.optimizers)} optimizers, configure_optimizers returned {configured}",
            fix="configure as many optimizers as were saved, or start a new run from the weights alone",
        )
    return stored.optimizers


def _optimizer_part(name: str, saved: Mapping[str, Any], members: Sequence[Members]) -> LoadedPart:
    """Returns what became of a saved optimizer whose state fits these members."""
    names = [each for group in members for each in group.names]
    before = [each for group in saved["param_groups"] for each in group["params"]]
    # By index in a file, by name in a directory; renamed parameters are matched by their order.
    by_index = not all(isinstance(each, str) for each in before)
    renamed = not by_index and set(before) != set(names)
    now = dict(zip(before, names, strict=False)) if by_index or renamed else {each: each for each in before}
    restored = [each for each in saved["state"] if not renamed or now.get(each) == each]
    return LoadedPart(
        name=name,
        restored=tuple(now.get(each, str(each)) for each in restored),
        converted=tuple(f"{each}: {now[each]}" for each in before if now[each] != each) if renamed else (),
    )


def _open_local(path: Path, weights_only: bool) -> StoredCheckpoint:
    if not path.is_dir():
        return _of_file(path, _torch_load(path, weights_only, str(path)))
    inside = sorted(child.name for child in path.iterdir() if child.suffix == ".ckpt")
    if inside:
        raise CheckpointError(f"{path} is a folder of checkpoints.", valid=inside, fix=f"{path / inside[0]}")
    return _open_folder(path, weights_only)


def _open_folder(path: Path | str, weights_only: bool) -> StoredCheckpoint:
    tensors = stored_tensors(path)
    try:
        source = BytesIO(read_file(f"{path}/{META_FILE}")) if isinstance(path, str) else path / META_FILE
        metadata, ours = _split_ours(path, _torch_load(source, weights_only, f"{path}/{META_FILE}"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is no finished checkpoint: it has no {META_FILE}", fix=_DAMAGED) from error
    return StoredCheckpoint(
        path=path,
        metadata=metadata,
        optimizers=ours.get("optimizers"),
        optimizer_names=None,
        extra=ours.get("extra", {}),
        random=ours.get("random"),
        places=ours.get("places", []),
        about=ours.get("about"),
        tensors=tensors,
        whole=None,
    )


def _of_file(path: Path | str, content: Any) -> StoredCheckpoint:
    if not isinstance(content, dict) or not isinstance(content.get(MODULE_KEY), Mapping):
        raise CheckpointError(
            f"{path} is no checkpoint: it holds no {MODULE_KEY}",
            fix="give a checkpoint that lightning_3d or Lightning saved",
        )
    metadata, ours = _split_ours(path, content)
    return StoredCheckpoint(
        path=path,
        tensors=None,
        whole=dict(metadata.pop(MODULE_KEY)),
        optimizers=metadata.pop(OPTIMIZERS_KEY, None),
        metadata=metadata,
        optimizer_names=ours.get("optimizers"),
        extra=ours.get("extra", {}),
        random=ours.get("random"),
        places=ours.get("places", []),
        about=ours.get("about"),
    )


def _split_ours(path: Path | str, content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Separates our notes from Lightning's metadata and brings the original containers back."""
    metadata = {key: value for key, value in content.items() if key != OURS}
    ours = content.get(OURS)
    if ours is None:
        return metadata, {}
    try:
        if ours["format"] > FORMAT:
            raise CheckpointError(
                f"{path} has format {ours['format']}, this version of lightning_3d reads up to {FORMAT}",
                fix="load it with the version that saved it, or a newer one",
            )
        parts = {key: from_plain(*ours[key]) for key in ("optimizers", "extra")}
        places = from_plain(*ours.get("places", ([], ())))
        return from_plain(metadata, ours["notes"]), {
            **parts,
            "random": ours["random"],
            "places": places,
            "about": ours.get("about", {}),
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the metadata of {path} are damaged: {error!r}", fix=_DAMAGED) from error


def _torch_load(source: Path | BytesIO, weights_only: bool, path: str) -> Any:
    try:
        # Mapped, so that the ranks of one machine share the pages and read only what they use.
        mapped = isinstance(source, Path) and zipfile.is_zipfile(source)
        return torch.load(source, map_location="cpu", weights_only=weights_only, mmap=mapped)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        if not weights_only:
            raise CheckpointError(f"{path} cannot be read: {error}", fix=_DAMAGED) from error
        reason = next((line for line in str(error).splitlines() if "GLOBAL" in line), str(error).splitlines()[0])
        raise CheckpointError(
            f"{path} holds more than plain data, which is not loaded unasked: {reason.strip()}",
            fix="if you trust who wrote it: trainer.fit(..., ckpt_path=..., weights_only=False)",
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, LookupError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}", fix=_DAMAGED) from error


def _empty(entry: TensorStorageMetadata) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype)


def _by_name(stored: StoredCheckpoint, index: int, members: Sequence[Members]) -> dict[str, Any]:
    """Returns the saved state of an optimizer, which has these members now, by names."""
    assert stored.optimizers is not None
    state = stored.optimizers[index]
    if stored.whole is None:
        return state
    names = [group.names for group in members] if stored.optimizer_names is None else stored.optimizer_names[index]
    sizes, own_sizes = [len(group["params"]) for group in state["param_groups"]], [len(group) for group in names]
    if sizes != own_sizes:
        raise CheckpointError(
            f"optimizer {index} has groups of {own_sizes} parameters, the saved one of {sizes}",
            fix="make the same parameter groups in configure_optimizers, or start a new run from the weights alone",
        )
    return named(state, names)
