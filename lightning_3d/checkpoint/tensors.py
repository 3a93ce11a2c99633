"""Tensors in a directory of torch.distributed.checkpoint: written by all ranks, read without trusting the files."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem as RemoteFiles
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, WriteResult

from lightning_3d.checkpoint.agreement import DAMAGED, together
from lightning_3d.errors import CheckpointError

_INDEX_CLASSES: Mapping[str, tuple[str, ...]] = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
        "MetadataIndex",
        "StorageMeta",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size", "device"),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath", "PurePosixPath"),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
}


def write_tensors(
    directory: Path | str, tensors: Mapping[str, Any], aliases: Mapping[str, str], group: dist.ProcessGroup | None
) -> None:
    """Writes tensors into a directory, every shard once, each file flushed to the disk.

    Args:
        directory: An empty directory that all ranks of ``group`` see, or the URL of one.
        tensors: Nested dicts of tensors; shards of DTensors are spread over the ranks that hold them.
        aliases: Flat name → flat name whose bytes it shares: the other names of tied tensors, which stand in the index
            only.
        group: The ranks that write, None for this process alone.
    """
    with _alone_is_meant():
        save(
            dict(tensors),
            storage_writer=_Writer(directory, aliases),
            process_group=group,
            no_dist=group is None,
        )


def read_tensors(
    directory: Path | str,
    into: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    reader: StorageReader | None = None,
) -> None:
    """Fills tensors in place from a directory; each rank reads what its own shards need.

    Args:
        directory: A finished checkpoint, as this rank sees it, or its URL.
        into: Flat name → tensor or DTensor of the stored shape.
        group: The ranks that read, None for this process alone.
        reader: Reads another form than torch's own, or an index that is in memory already.

    Raises:
        CheckpointError: On every rank, if any rank could not read.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with together(group, f"read the checkpoint {directory}", DAMAGED), _alone_is_meant():
        load(
            dict(into),
            storage_reader=reader or IndexReader(directory),
            planner=planner,
            process_group=group,
            no_dist=group is None,
        )


def read_values(directory: Path, names: Sequence[str], planner: LoadPlanner) -> dict[str, Any]:
    """Returns what a directory holds that is no tensor, by flat name.

    Args:
        directory: A finished checkpoint.
        names: Which of it.
        planner: Makes values of the bytes.

    Raises:
        CheckpointError: They cannot be read.
    """
    values: dict[str, Any] = dict.fromkeys(names)
    with together(None, f"read the checkpoint {directory}", DAMAGED), _alone_is_meant():
        load(values, storage_reader=IndexReader(directory), planner=planner, no_dist=True)
    return values


def stored_tensors(directory: Path | str) -> dict[str, TensorStorageMetadata]:
    """Returns what a directory holds: flat name → size and dtype.

    Args:
        directory: A finished checkpoint.

    Raises:
        CheckpointError: The index is missing, is no index, or names files outside the directory.
    """
    index = IndexReader(directory).read_metadata().state_dict_metadata
    return {name: entry for name, entry in index.items() if isinstance(entry, TensorStorageMetadata)}


class _Writer(FileSystemWriter):
    """Adds the aliases to the index, where they point to the bytes of the tensor they are tied to."""

    def __init__(self, path: Path | str, aliases: Mapping[str, str]) -> None:
        super().__init__(path, sync_files=isinstance(path, Path), overwrite=False)
        if isinstance(path, str):
            _behind_url(self, path)
        self._aliases = dict(aliases)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = [result for of_rank in results for result in of_rank]
        planner_data = dict(metadata.planner_data or {})
        for alias, name in self._aliases.items():
            metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
            prefix = next(iter(planner_data[name]))
            planner_data[alias] = (prefix, alias.removeprefix(f"{prefix}."))
            written += [
                dataclasses.replace(result, index=MetadataIndex(alias, result.index.offset, result.index.index))
                for result in written
                if result.index.fqn == name
            ]
        metadata.planner_data = planner_data
        super().finish(metadata, [written])


class IndexReader(FileSystemReader):
    """Reads the index with a closed set of classes, and refuses files outside the directory.

    Args:
        path: A finished checkpoint.
        index: Its index, if it has been read already.
    """

    def __init__(self, path: Path | str, index: Metadata | None = None) -> None:
        super().__init__(path)
        if isinstance(path, str):
            _behind_url(self, path)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the index, read and checked once."""
        if self._index is None:
            self._index = self._checked()
        self._index.storage_meta = dataclasses.replace(self._index.storage_meta or StorageMeta(), load_id=self.load_id)
        return self._index

    def _checked(self) -> Metadata:
        path = self.fs.concat_path(self.path, ".metadata")
        try:
            with self.fs.create_stream(path, "rb") as stream:
                index = _IndexUnpickler(stream).load()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{self.path} is no finished checkpoint: it has no index (.metadata)", fix=DAMAGED
            ) from error
        except (pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
            raise CheckpointError(f"{path} is not the index of a checkpoint: {error}", fix=DAMAGED) from error
        if not isinstance(index, Metadata):
            raise CheckpointError(f"{path} is not the index of a checkpoint", fix=DAMAGED)
        try:
            names = {str(entry.relative_path) for entry in (index.storage_data or {}).values()}
        except AttributeError as error:
            raise CheckpointError(f"{path} is not the index of a checkpoint: {error}", fix=DAMAGED) from error
        for name in sorted(names):
            if not _is_inside(self.path if isinstance(self.path, str) else Path(self.path), name):
                raise CheckpointError(
                    f"{path} names a file outside the checkpoint: {name}", fix="do not load this checkpoint"
                )
        return index


def _is_inside(directory: Path | str, name: str) -> bool:
    """Returns whether a name in an index is that of a file inside the directory, links followed."""
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "://" in name:
        return False
    if isinstance(directory, str):
        return True
    return (directory / parts).resolve().is_relative_to(directory.resolve())


def _behind_url(files: Any, url: str) -> None:
    """Has torch's reader or writer of local files work through fsspec, as its own for URLs do."""
    files.fs = RemoteFiles()
    files.path = files.fs.init_path(url)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "builtins" and name == "getattr":
            return _enum_member
        if name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"an index has no use for {module}.{name}")


def _enum_member(kind: Any, name: str) -> Any:
    """Stands for ``getattr``, by which some Python versions pickle the members of an enum."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(f"an index has no use for the attribute {name}")


@contextmanager
def _alone_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        yield
