"""Tensors that lie on the disk, in whichever form: read whole, or by each rank the parts that it holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from lightning_3d.checkpoint.agreement import DAMAGED, together
from lightning_3d.checkpoint.layout import fill
from lightning_3d.checkpoint.tensors import IndexReader, read_tensors

# Which bytes a tensor is made of: offsets in the tensor, file, place in the file.
_Bytes: TypeAlias = tuple[tuple[tuple[int, ...], str, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """What is known of a stored tensor before it is read.

    Attributes:
        shape: Its whole shape.
        dtype: Its dtype.
    """

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.shape.numel() * self.dtype.itemsize


class TensorSource(ABC):
    """Tensors on the disk by name.

    Attributes:
        path: Where they lie.
        forms: Shape and dtype of each.
        ties: Another name → the name of the tensor that it shares its bytes with.
        lent: What a writer has got last, and needs until it asks for more.
    """

    path: Path
    forms: Mapping[str, Form]
    ties: Mapping[str, str]
    lent: Tensor | None = None

    @abstractmethod
    def read(self, into: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
        """Fills tensors in place, casting to their dtype; each rank reads what its own shards need.

        Args:
            into: Name → a tensor, DTensor or PackedTensor of the stored shape.
            group: The ranks that read together, None for this process alone.

        Raises:
            CheckpointError: On every rank, if any rank could not read.
        """

    def whole(self, name: str) -> Tensor:
        """Returns one whole tensor, in memory of its own."""
        form = self.forms[name]
        tensor = torch.empty(form.shape, dtype=form.dtype)
        self.read({name: tensor})
        return tensor


class DirectoryTensors(TensorSource):
    """A directory of torch.distributed.checkpoint, by its flat names.

    Attributes:
        others: Flat names of what is no tensor.
        paths: Flat name → the keys that lead to it in what was saved.

    Args:
        path: A finished checkpoint.

    Raises:
        CheckpointError: Its index is missing, is no index, or names files outside the directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._index: Metadata = IndexReader(path).read_metadata()
        entries = self._index.state_dict_metadata
        self.forms = {
            name: Form(shape=entry.size, dtype=entry.properties.dtype)
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.others = tuple(name for name, entry in entries.items() if isinstance(entry, BytesStorageMetadata))
        self.paths: Mapping[str, tuple[str | int, ...]] = self._index.planner_data or {}
        self.ties = self._shared()

    def read(self, into: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
        """See the base class."""
        read_tensors(self.path, into, group, IndexReader(self.path, self._index))

    def _shared(self) -> dict[str, str]:
        places: dict[str, list[tuple[tuple[int, ...], str, int]]] = {}
        for index, info in (self._index.storage_data or {}).items():
            if index.fqn in self.forms:
                places.setdefault(index.fqn, []).append((tuple(index.offset or ()), info.relative_path, info.offset))
        first: dict[_Bytes, str] = {}
        found = {name: first.setdefault(tuple(sorted(places.get(name, ()))), name) for name in self.forms}
        return {name: owner for name, owner in found.items() if owner != name and places.get(name)}


class MappedTensors(TensorSource):
    """Whole tensors that a file was mapped to, so that pages are read when they are used.

    Args:
        path: The file.
        tensors: By name.
    """

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        self.path = path
        self._tensors = tensors
        self.forms = {name: Form(shape=tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
        first: dict[tuple[object, ...], str] = {}
        found = {name: first.setdefault(memory_of(tensor), name) for name, tensor in tensors.items()}
        self.ties = {name: owner for name, owner in found.items() if owner != name}

    def read(self, into: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
        """See the base class."""
        with together(group, f"read the checkpoint {self.path}", DAMAGED):
            for name, target in into.items():
                fill(target, self._tensors[name])


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Returns what two tensors have in common that are views of the same elements; nothing else has it."""
    if not tensor.numel():
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
