"""Checkpoint folders behind a URL, where nothing can be renamed in one step: object stores, through fsspec.

Each save goes into a folder of its own, ``<url>/<id>/``. When all of it is there, one small file, ``<url>/complete``,
is put in the place of the one before and names it: that is the step which counts. A save that never finished is named
by nothing, and what was there before stays what is loaded.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from lightning_3d.checkpoint.agreement import gather, group_rank, together
from lightning_3d.errors import CheckpointError

MARKER = "complete"
_ID = re.compile(r"[0-9a-f]{12}")
_INDEX = ".metadata"
_FIX = "check the address, its permissions and the space that is left, then save again"


@contextmanager
def remote_folder(url: str, group: dist.ProcessGroup | None) -> Iterator[str]:
    """Gives every rank a new folder to write under, and makes it the one that is loaded when all have finished.

    Args:
        url: The checkpoint.
        group: All ranks that save together, None for one process.

    Yields:
        The folder's own URL.

    Raises:
        CheckpointError: On every rank, if any rank failed. What was there before is still what is loaded.
    """
    name = gather(group, uuid.uuid4().hex[:12])[0]
    folder, leads = f"{url.rstrip('/')}/{name}", group_rank(group) == 0
    try:
        with together(group, f"write the checkpoint {url}", _FIX):
            if leads:
                _make(folder)
        with together(group, f"write the checkpoint {url}", _FIX):
            yield folder
        with together(group, f"write the checkpoint {url}", _FIX):
            if leads:
                _publish(url, name)
    except BaseException:
        if leads:
            with suppress(Exception):
                _delete(folder)
        raise


def write_file(url: str, content: Any) -> None:
    """Writes a file whole or not at all, as far as the file system behind the URL can.

    Args:
        url: Where to.
        content: Bytes.
    """
    files, path = url_to_fs(url)
    with files.transaction, files.open(path, "wb") as stream:
        stream.write(content)


def read_file(url: str) -> bytes:
    """Returns the bytes of a file."""
    files, path = url_to_fs(url)
    content: bytes = files.cat_file(path)
    return content


def finished_folder(url: str) -> str | None:
    """Returns the folder that a checkpoint is in; None for a single file.

    Args:
        url: A checkpoint, or a copy of a directory that was saved elsewhere.

    Raises:
        CheckpointError: There is nothing, or nothing that was finished.
    """
    files, path = url_to_fs(url)
    if files.exists(f"{path}/{MARKER}"):
        name = read_file(f"{url.rstrip('/')}/{MARKER}").decode(errors="replace").strip()
        if not _ID.fullmatch(name):
            raise CheckpointError(f"{url}/{MARKER} names {name!r}, which is no folder of a checkpoint", fix=_other())
        return f"{url.rstrip('/')}/{name}"
    if files.exists(f"{path}/{_INDEX}"):
        return url.rstrip("/")
    if files.isdir(path):
        raise CheckpointError(f"{url} is a checkpoint whose writing never finished", fix=_other())
    if not files.exists(path):
        raise CheckpointError(f"there is no checkpoint {url}", fix="give the address of a checkpoint")
    return None


def version(url: str) -> str:
    """Returns what tells a finished checkpoint from others that are, or were, under the same address.

    Args:
        url: See `finished_folder`.

    Raises:
        CheckpointError: There is nothing, or nothing that was finished.
    """
    files, path = url_to_fs(url)
    return finished_folder(url) or str(files.ukey(path))


def remove_remote(url: str) -> None:
    """Removes a checkpoint, first what makes it one; nothing happens if it does not exist.

    Args:
        url: A folder or a file.
    """
    files, path = url_to_fs(url)
    if files.exists(f"{path}/{MARKER}"):
        files.rm(f"{path}/{MARKER}")
    _delete(url)


def _make(folder: str) -> None:
    files, path = url_to_fs(folder)
    files.makedirs(path, exist_ok=True)


def _publish(url: str, name: str) -> None:
    write_file(f"{url.rstrip('/')}/{MARKER}", name.encode())
    files, path = url_to_fs(url)
    files.invalidate_cache()
    for other in files.ls(path, detail=False):
        own = other.rstrip("/").rpartition("/")[2]
        if _ID.fullmatch(own) and own != name:
            with suppress(FileNotFoundError):
                files.rm(other, recursive=True)


def _delete(url: str) -> None:
    files, path = url_to_fs(url)
    with suppress(FileNotFoundError):
        files.rm(path, recursive=True)


def _other() -> str:
    return "load another checkpoint, and delete this one"
