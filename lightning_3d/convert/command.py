"""``lightning-3d convert``: a checkpoint in another form, in one process and without a network."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from lightning_3d.checkpoint.files import atomic_path, find_disk
from lightning_3d.checkpoint.store import save, whole_checkpoint
from lightning_3d.checkpoint.stored import StoredTensor
from lightning_3d.convert.contents import Contents, Kind, read_contents
from lightning_3d.convert.progress import Progress
from lightning_3d.convert.safetensors_files import Export, choose, save_files
from lightning_3d.convert.torch_file import save_streamed
from lightning_3d.errors import CheckpointError

_MESH, _TORCH, _SAFETENSORS = "mesh", "torch", "safetensors"
_ALREADY = {Kind.MESH: _MESH, Kind.FILE: _TORCH}
_SHOWN = 8
_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD
_LARGE = 2**20


def run(arguments: Sequence[str]) -> int:
    """Converts, prints what was written, and returns the exit code.

    Args:
        arguments: The words after the verb.

    Raises:
        CheckpointError: The checkpoint cannot be read, or the other form cannot be written.
        ConfigError: An option has an impossible value.
    """
    options = _parser().parse_args(list(arguments))
    _give_memory_back()
    progress = Progress()
    try:
        for line in convert(
            Path(options.checkpoint),
            Path(options.out),
            options.to,
            progress,
            prefix=options.prefix,
            size=options.max_shard_size,
            weights_only=options.weights_only,
        ):
            print(line)
    finally:
        progress.end()
    return 0


def convert(
    source: Path,
    out: Path,
    form: str,
    progress: Progress,
    *,
    prefix: str | None = None,
    size: str = "5GB",
    weights_only: bool = False,
) -> list[str]:
    """Writes a checkpoint in another form; ``out`` is there whole at the end, or not at all.

    Args:
        source: The checkpoint: of lightning_3d, of Lightning, or safetensors.
        out: Where to; nothing may be there.
        form: "mesh", "torch" or "safetensors".
        progress: Shows how far it is.
        prefix: For safetensors to take off the names, from safetensors to put before them; None guesses the former.
        size: The largest file of safetensors.
        weights_only: Leave out optimizers.

    Returns:
        What to tell the user, line by line.
    """
    out = out.absolute()
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists already", fix="choose another name, or remove it")
    contents = read_contents(
        source.expanduser().absolute(),
        progress,
        weights_only=weights_only or form == _SAFETENSORS,
        names=form == _MESH,
    )
    if _ALREADY.get(contents.kind) == form and not weights_only:
        raise CheckpointError(f"{source} is {contents.kind.value} already", fix=f"--to {_others(form)}")
    if form == _SAFETENSORS:
        return _to_safetensors(contents, out, progress, prefix, size)
    state = contents.state
    if prefix is not None:
        if contents.kind is not Kind.HUGGING_FACE:
            raise CheckpointError(
                f"--prefix changes names, and those in {source} are of the LightningModule",
                fix="leave --prefix out; it is for --to safetensors, and for safetensors that come in",
            )
        state = replace(state, module={f"{prefix}{name}": value for name, value in state.module.items()})
    progress.begin(_nbytes(state.module, state.optimizers))
    if form == _MESH:
        save(out, state, distributed=True, group=None)
    else:
        disk = find_disk(out.parent, None)
        checkpoint = whole_checkpoint(out, state, True, None)
        with atomic_path(out, disk, None, directory=False) as temporary:
            save_streamed(checkpoint, temporary)
    lines = [_written(contents, out, [v for v in state.module.values() if isinstance(v, Tensor)])]
    optimizers = len(state.optimizers or ())
    lines += (
        [f"  {optimizers} optimizer{'s' if optimizers > 1 else ''} with {'its' if optimizers == 1 else 'their'} state"]
        if optimizers
        else []
    )
    lines += [f"  names begin with {prefix!r} now"] if prefix else []
    lines += ["  no optimizer: training can start from it, and not be resumed"] if not optimizers else []
    return lines


def _to_safetensors(contents: Contents, out: Path, progress: Progress, prefix: str | None, size: str) -> list[str]:
    export = choose(contents.state.module, prefix)
    progress.begin(_nbytes(export.tensors, None))
    disk = find_disk(out.parent, None)
    with atomic_path(out, disk, None, directory=True) as temporary:
        files = save_files(export, temporary, size)
    lines = [f"{_written(contents, out, [*export.tensors.values()])}, in {files} file{'s' if files > 1 else ''}"]
    return lines + _said(export, guessed=prefix is None)


def _said(export: Export, *, guessed: bool) -> list[str]:
    lines = []
    if export.prefix:
        why = ", under which the whole module lies" if guessed else ""
        lines.append(f"  {export.prefix!r} is taken off the names{why}")
    elif guessed:
        lines.append("  names are as in the LightningModule: no one attribute holds everything (--prefix NAME.)")
    if export.tied:
        lines.append(f"  tied, and written once: {_few(export.tied)}")
    if export.outside:
        lines.append(f"  left out: {_few(export.outside)}")
    lines.append("  from_pretrained needs config.json beside it: model.config.save_pretrained(OUT)")
    return lines


def _give_memory_back() -> None:
    """Has glibc return the memory of each large tensor when it is freed, where small ones would pin it otherwise."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, _LARGE)


def _written(contents: Contents, out: Path, tensors: list[Tensor]) -> str:
    unique = {id(tensor): tensor for tensor in tensors}
    size = sum(path.stat().st_size for path in (out.rglob("*") if out.is_dir() else [out]) if path.is_file())
    return f"{out}: {len(unique)} tensors of {contents.path.name} ({contents.kind.value}), {size / 2**20:.1f} MiB"


def _nbytes(*trees: object) -> int:
    from torch.utils._pytree import tree_leaves

    leaves = {id(leaf): leaf for tree in trees for leaf in tree_leaves(tree) if isinstance(leaf, StoredTensor)}
    return sum(leaf.numel() * leaf.itemsize for leaf in leaves.values())


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _others(form: str) -> str:
    return "|".join(each for each in (_MESH, _TORCH, _SAFETENSORS) if each != form)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-3d convert", description="Writes a checkpoint in another form, in one process."
    )
    parser.add_argument("checkpoint", help="of lightning_3d, of Lightning, or safetensors")
    parser.add_argument("out", help="where to; nothing may be there")
    parser.add_argument(
        "--to",
        required=True,
        choices=(_TORCH, _SAFETENSORS, _MESH),
        help="one file that plain Lightning resumes; weights for Hugging Face; a directory for any mesh",
    )
    parser.add_argument(
        "--prefix", help="to safetensors: taken off the names (found if left out); from safetensors: put before them"
    )
    parser.add_argument("--max-shard-size", default="5GB", help="largest file of safetensors (%(default)s)")
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizers out")
    return parser
