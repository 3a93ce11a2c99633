"""Atomic writing: a name always holds a whole checkpoint, the old one or the new one, whatever dies in between.

Everything is written under ``<name>.tmp-<id>`` beside the target and renamed when every rank has finished. Where the
file system can exchange two names, replacing is one step; elsewhere the old one first becomes ``<name>.old-<id>``, and
:func:`resolve` finds it there after a crash between the two renames.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from lightning_3d.checkpoint.agreement import gather, group_rank, together
from lightning_3d.errors import CheckpointError, nearest

_LOCAL_SCHEME = "file://"
_TEMPORARY = ".tmp-"
_REPLACED = ".old-"
_CURRENT_DIRECTORY = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
_WRITING_FIX = "free space, correct the permissions or choose another directory, then save again"


def is_remote(path: str | Path) -> bool:
    """Returns whether a path is a URL, not a name on this machine."""
    return "://" in str(path) and not str(path).startswith(_LOCAL_SCHEME)


def local_path(path: str | Path) -> Path:
    """Returns the absolute path that a name on this machine means."""
    return Path(str(path).removeprefix(_LOCAL_SCHEME)).absolute()


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """Which ranks of a group see one directory as the same.

    Attributes:
        rank: This process' position in the group.
        leader: The lowest rank that sees the same directory as this one; it makes and renames.
        leaders: The leaders of all the distinct directories, ascending.
    """

    rank: int
    leader: int
    leaders: tuple[int, ...]

    @property
    def shared(self) -> bool:
        """Whether all ranks see the same directory."""
        return len(self.leaders) == 1

    @property
    def leads(self) -> bool:
        """Whether this process is a leader."""
        return self.rank == self.leader


def find_disk(directory: Path, group: dist.ProcessGroup | None) -> Disk:
    """Finds out who shares ``directory``, by a short-lived file that others look for. Every rank calls it.

    Args:
        directory: The directory as this rank names it; made if it is missing.
        group: All ranks that save together, None for one process.

    Raises:
        CheckpointError: A rank cannot make the directory or write into it.
    """
    rank = group_rank(group)
    identity: tuple[str, int, int] | None = None
    with together(group, f"write into {directory}", _WRITING_FIX):
        directory.mkdir(parents=True, exist_ok=True)
        status = directory.stat()
        identity = (socket.gethostname(), status.st_dev, status.st_ino)
    token, identities = zip(*gather(group, (uuid.uuid4().hex, identity)), strict=True)
    speakers = [index for index, other in enumerate(identities) if identities.index(other) == index]
    probes = {index: directory / f".probe-{token[0]}-{index}" for index in speakers}
    try:
        with together(group, f"write into {directory}", _WRITING_FIX):
            if rank in probes:
                probes[rank].touch(exist_ok=False)
        seen = [index for index, probe in probes.items() if probe.exists()]
        leaders = gather(group, min(seen, default=rank))
    finally:
        if rank in probes:
            probes[rank].unlink(missing_ok=True)
    return Disk(rank=rank, leader=leaders[rank], leaders=tuple(sorted(set(leaders))))


@contextmanager
def atomic_path(target: Path, disk: Disk, group: dist.ProcessGroup | None, *, directory: bool) -> Iterator[Path]:
    """Gives every rank a temporary name beside ``target`` to write under, then puts it in the target's place.

    The body may hold collectives only where it exchanges failures itself (see ``agreement.together``).

    Args:
        target: The final name, as this rank sees it.
        disk: From :func:`find_disk` of the target's parent.
        group: All ranks that save together, None for one process.
        directory: Whether the checkpoint is a directory; False for one file.

    Yields:
        The temporary path: an empty directory, or the name of a file to write.

    Raises:
        CheckpointError: On every rank, if any rank failed. What stood at ``target`` still does, the temporary is gone.
    """
    doing = f"write the checkpoint {target}"
    temporary = target.with_name(f"{target.name}{_TEMPORARY}{gather(group, uuid.uuid4().hex[:12])[0]}")
    try:
        with together(group, doing, _WRITING_FIX):
            if directory and disk.leads:
                temporary.mkdir()
        with together(group, doing, _WRITING_FIX):
            yield temporary
            if disk.leads:
                _sync(temporary)
        with together(group, doing, _WRITING_FIX):
            if disk.leads:
                publish(temporary, target)
    except BaseException:
        if disk.leads:
            _discard(temporary)
        raise


def publish(temporary: Path, target: Path) -> None:
    """Puts ``temporary`` in the place of ``target``, which may exist, and removes what stood there or was left behind.

    Args:
        temporary: A finished file or directory in the target's directory.
        target: The final name.
    """
    if not os.path.lexists(target):
        temporary.rename(target)
    elif temporary.is_file() and not _is_real_directory(target):
        temporary.replace(target)
    elif not _exchange(temporary, target):
        target.rename(target.with_name(temporary.name.replace(_TEMPORARY, _REPLACED)))
        temporary.rename(target)
    _flush(target.parent)
    for leftover in _beside(target, _TEMPORARY) + _beside(target, _REPLACED):
        _discard(leftover)


def remove(path: Path) -> None:
    """Removes a checkpoint so that no half of it can ever be loaded; any number of ranks may call it at once.

    Args:
        path: The checkpoint; nothing happens if it does not exist.
    """
    doomed = path.with_name(f"{path.name}{_TEMPORARY}{uuid.uuid4().hex[:12]}")
    with suppress(FileNotFoundError):
        path.rename(doomed)
        _discard(doomed)
    for leftover in _beside(path, _REPLACED):
        _discard(leftover)


def resolve(path: Path) -> Path:
    """Returns where the checkpoint named ``path`` lies now.

    Args:
        path: The name under which it was saved.

    Raises:
        CheckpointError: It does not exist, or the name is that of an unfinished one.
    """
    if _TEMPORARY in path.name:
        raise CheckpointError(
            f"{path} is a checkpoint whose writing never finished",
            valid=_siblings(path) or "none in this directory",
            fix="load a finished checkpoint, and delete this one",
        )
    if path.exists():
        return path
    replaced = _beside(path, _REPLACED)
    if replaced:
        return replaced[-1]
    siblings = _siblings(path)
    close = nearest(path.name, siblings)
    fix = f"did you mean {path.with_name(close)}?" if close else "give the path of a checkpoint"
    raise CheckpointError(f"there is no checkpoint {path}", valid=siblings or "none in this directory", fix=fix)


def _beside(path: Path, kind: str) -> list[Path]:
    if not path.parent.is_dir():
        return []
    return sorted(entry for entry in path.parent.iterdir() if entry.name.startswith(path.name + kind))


def _siblings(path: Path) -> list[str]:
    if not path.parent.is_dir():
        return []
    found = (entry for entry in path.parent.iterdir() if entry.suffix == ".ckpt" or (entry / ".metadata").exists())
    return sorted(entry.name for entry in found if _TEMPORARY not in entry.name)


def _is_real_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_CURRENT_DIRECTORY, os.fsencode(one), _CURRENT_DIRECTORY, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def _sync(path: Path) -> None:
    """Flushes a file, or a directory with the files in it, to the disk."""
    if path.is_dir():
        for entry in path.iterdir():
            if entry.is_file():
                _flush(entry)
    _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _discard(path: Path) -> None:
    if _is_real_directory(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
