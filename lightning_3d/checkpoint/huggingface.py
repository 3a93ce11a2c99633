"""Weights in the form of Hugging Face: one safetensors file, or several with an index, read slice by slice."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from lightning_3d.checkpoint.sources import Form, TensorSource
from lightning_3d.checkpoint.tensors import read_tensors
from lightning_3d.errors import CheckpointError, few

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_DAMAGED = "copy or download the weights again, these are damaged"


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A stored tensor as one part of another, or as all of it.

    Attributes:
        stored: Its name in the file.
        offsets: Where it begins in the other.
        sizes: Its shape there.
        stacked: The dim of the other that it does not have itself, where its size is 1; None if it has all.
    """

    stored: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stacked: int | None = None


class HuggingFaceTensors(TensorSource):
    """Safetensors of a directory, or of one file, by the names in it.

    Args:
        path: A directory, a ``.safetensors`` file, or an index of several.

    Raises:
        CheckpointError: Files are missing, damaged, or hold the same name twice; the index leaves the directory; or
            the package that reads them is not installed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ties: Mapping[str, str] = {}
        self._files: dict[str, Path] = {}
        forms: dict[str, Form] = {}
        listed = _listed(path)
        for file in dict.fromkeys(listed.values()) or _single(path):
            for name, form in _header(file).items():
                if listed and listed.get(name) != file:
                    continue
                if name in forms:
                    raise CheckpointError(
                        f"{self._files[name]} and {file} both hold {name}",
                        fix="give one of the files, or the index of those that belong together",
                    )
                forms[name], self._files[name] = form, file
        lost = [name for name in listed if name not in forms]
        if lost:
            raise CheckpointError(
                f"the index of {path} names {len(lost)} tensors that are not in their files ({few(lost)})",
                fix=_DAMAGED,
            )
        self.forms: Mapping[str, Form] = forms
        self.parts: Mapping[str, Sequence[Part]] = {
            name: (Part(stored=name, offsets=(0,) * len(form.shape), sizes=form.shape),) for name, form in forms.items()
        }

    def joined(self, parts: Mapping[str, Sequence[Part]], forms: Mapping[str, Form]) -> HuggingFaceTensors:
        """Returns the same files as other tensors.

        Args:
            parts: The parts of each tensor, by its new name; they cover it.
            forms: Shape and dtype of each.
        """
        other = copy.copy(self)
        other.parts, other.forms = parts, forms
        return other

    def read(self, into: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
        """See the base class."""
        directory = self.path if self.path.is_dir() else self.path.parent
        read_tensors(directory, into, group, _Reader(directory, self._index()))

    def _index(self) -> Metadata:
        entries = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=self.forms[name].dtype),
                size=self.forms[name].shape,
                chunks=[ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)) for part in parts],
            )
            for name, parts in self.parts.items()
        }
        places = {
            MetadataIndex(name, torch.Size(part.offsets)): _Place(str(self._files[part.stored]), part)
            for name, parts in self.parts.items()
            for part in parts
        }
        return Metadata(state_dict_metadata=dict(entries), storage_data=places)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a part lies; torch's planner knows its file by this name."""

    relative_path: str
    part: Part


class _Reader(HuggingFaceStorageReader):
    """Reads the files of an index alone, and tensors without dimensions too."""

    def __init__(self, directory: Path, index: Metadata) -> None:
        super().__init__(str(directory))
        self._index = index

    def read_metadata(self) -> Metadata:
        self._index.storage_meta = StorageMeta(load_id=self.load_id)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Part, Any]]] = {}
        for item in plan.items:
            place: _Place = self.storage_data[item.storage_index]
            by_file.setdefault(place.relative_path, []).append((place.part, item))
        for file, items in by_file.items():
            with _opened(Path(file)) as stored:
                for part, item in items:
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(_window(stored, part, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _window(stored: Any, part: Part, item: ReadItem) -> Tensor:
    """Reads what is asked of a part."""
    ends = zip(item.storage_offsets, item.lengths, strict=True)
    window = [slice(start, start + length) for start, length in ends]
    if part.stacked is not None:
        del window[part.stacked]
    # A slice of a tensor without dims is none.
    found: Tensor = stored.get_slice(part.stored)[tuple(window)] if window else stored.get_tensor(part.stored)
    return found if part.stacked is None else found.unsqueeze(part.stacked)


def is_huggingface(path: Path) -> bool:
    """Returns whether a path is a safetensors file, an index of some, or a directory that holds any."""
    if path.is_dir():
        return any(child.name.endswith((SUFFIX, INDEX_SUFFIX)) for child in path.iterdir())
    return path.name.endswith((SUFFIX, INDEX_SUFFIX))


def _single(path: Path) -> list[Path]:
    """Returns the files of a path without an index."""
    if not path.is_dir():
        return [path]
    return [path / f"model{SUFFIX}"] if (path / f"model{SUFFIX}").exists() else sorted(path.glob(f"*{SUFFIX}"))


def _listed(path: Path) -> dict[str, Path]:
    """Returns the file of each tensor as an index says; empty without an index."""
    found = sorted(path.glob(f"*{INDEX_SUFFIX}")) if path.is_dir() else [path] if path.suffix == ".json" else []
    if not found:
        return {}
    if len(found) > 1:
        raise CheckpointError(f"{path} holds several models", valid=[file.name for file in found], fix=f"{found[0]}")
    try:
        names = dict(json.loads(found[0].read_text())["weight_map"])
        files = {str(name): str(file) for name, file in names.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{found[0]} is no index of weights: {error!r}", fix=_DAMAGED) from error
    outside = [file for file in files.values() if PurePosixPath(file).name != file]
    if outside:
        raise CheckpointError(f"{found[0]} names a file outside its directory: {outside[0]}", fix="do not load it")
    return {name: found[0].parent / file for name, file in files.items()}


def _header(file: Path) -> dict[str, Form]:
    with _opened(file) as stored:
        from safetensors.torch import _getdtype

        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 (it is no mapping)
        return {
            name: Form(shape=torch.Size(each.get_shape()), dtype=_getdtype(each.get_dtype()))
            for name, each in slices.items()
        }


def _opened(file: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise CheckpointError(
            f"{file} needs the package safetensors to be read", fix="pip install 'lightning-3d[hf]'"
        ) from error
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no file {file}", fix=_DAMAGED) from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}", fix=_DAMAGED) from error
