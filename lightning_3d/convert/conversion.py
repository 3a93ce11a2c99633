"""From one form of a checkpoint to another, and what there is to tell about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_3d.checkpoint.files import atomic_path, find_disk
from lightning_3d.checkpoint.store import save, whole_checkpoint
from lightning_3d.checkpoint.stored import StoredTensor
from lightning_3d.convert.contents import Contents, Kind, read_contents
from lightning_3d.convert.progress import Progress
from lightning_3d.convert.safetensors_files import Export, choose, save_files
from lightning_3d.convert.torch_file import save_streamed
from lightning_3d.convert.wish import FORMS, MESH, SAFETENSORS, TORCH, Wish, place_for
from lightning_3d.errors import CheckpointError, few_and_more
from lightning_3d.units import counted, format_bytes

_ALREADY: Mapping[Kind, str] = {Kind.MESH: MESH, Kind.FILE: TORCH}


def convert(source: Path, out: Path, wish: Wish, progress: Progress) -> list[str]:
    """Writes a checkpoint in another form; ``out`` is there whole at the end, or not at all.

    Args:
        source: The checkpoint: of lightning_3d, of Lightning, or safetensors.
        out: Where to; nothing may be there.
        wish: What to write.
        progress: Shows how far it is.

    Returns:
        What to tell the user, line by line.

    Raises:
        CheckpointError: The checkpoint cannot be read, or the other form cannot be written.
        ConfigError: An option has an impossible value.
    """
    out = place_for(out)
    contents = read_contents(
        source.expanduser().absolute(),
        progress,
        weights_only=wish.weights_only or wish.form == SAFETENSORS,
        names=wish.form == MESH,
    )
    if _ALREADY.get(contents.kind) == wish.form and not wish.weights_only:
        others = "|".join(form for form in FORMS if form != wish.form)
        raise CheckpointError(f"{source} is {contents.kind.value} already", fix=f"--to {others}")
    if wish.form == SAFETENSORS:
        return _to_safetensors(contents, out, wish, progress)
    return _to_checkpoint(contents, out, wish, progress)


def _to_checkpoint(contents: Contents, out: Path, wish: Wish, progress: Progress) -> list[str]:
    state, prefix = contents.state, wish.prefix
    if prefix is not None and contents.kind is not Kind.HUGGING_FACE:
        raise CheckpointError(
            f"--prefix changes names, and those in {contents.path} are of the LightningModule",
            fix="leave --prefix out; it is for --to safetensors, and for safetensors that come in",
        )
    if prefix is not None:
        state = replace(state, module={f"{prefix}{name}": value for name, value in state.module.items()})
    progress.begin(_nbytes(state.module, state.optimizers))
    if wish.form == MESH:
        save(out, state, distributed=True, group=None)
    else:
        disk = find_disk(out.parent, None)
        checkpoint = whole_checkpoint(out, state, True, None)
        with atomic_path(out, disk, None, directory=False) as temporary:
            save_streamed(checkpoint, temporary)
    lines = [_written(contents, out, state.module.values())]
    if prefix:
        lines.append(f"  names begin with {prefix!r} now")
    count = len(state.optimizers or ())
    if not count:
        return [*lines, "  no optimizer: training can start from it, and not be resumed"]
    return [*lines, f"  {counted(count, 'optimizer')} with {'its' if count == 1 else 'their'} state"]


def _to_safetensors(contents: Contents, out: Path, wish: Wish, progress: Progress) -> list[str]:
    export = choose(contents.state.module, wish.prefix)
    progress.begin(_nbytes(export.tensors))
    disk = find_disk(out.parent, None)
    with atomic_path(out, disk, None, directory=True) as temporary:
        files = save_files(export, temporary, wish.size)
    line = f"{_written(contents, out, export.tensors.values())}, in {counted(files, 'file')}"
    return [line, *_said(export, guessed=wish.prefix is None)]


def _said(export: Export, *, guessed: bool) -> list[str]:
    lines = []
    if export.prefix:
        why = ", under which the whole module lies" if guessed else ""
        lines.append(f"  {export.prefix!r} is taken off the names{why}")
    elif guessed:
        lines.append("  names are as in the LightningModule: no one attribute holds everything (--prefix NAME.)")
    if export.tied:
        lines.append(f"  tied, and written once: {few_and_more(export.tied)}")
    if export.outside:
        lines.append(f"  left out: {few_and_more(export.outside)}")
    lines.append("  from_pretrained needs config.json beside it: model.config.save_pretrained(OUT)")
    return lines


def _written(contents: Contents, out: Path, values: Iterable[object]) -> str:
    unique = {id(value) for value in values if isinstance(value, Tensor)}
    size = sum(path.stat().st_size for path in (out.rglob("*") if out.is_dir() else [out]) if path.is_file())
    return f"{out}: {len(unique)} tensors of {contents.path.name} ({contents.kind.value}), {format_bytes(size)}"


def _nbytes(*trees: object) -> int:
    leaves = {id(leaf): leaf for tree in trees for leaf in tree_leaves(tree) if isinstance(leaf, StoredTensor)}
    return sum(leaf.numel() * leaf.itemsize for leaf in leaves.values())
