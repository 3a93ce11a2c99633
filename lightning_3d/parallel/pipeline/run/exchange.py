"""Handing what one rank computed to all ranks of the pipeline: objects by pickle, all tensors in one call."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.parallel.pipeline.run.effects import Path
from lightning_3d.parallel.pipeline.run.parts import WatchedShard
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.partial import PartialTensor
from lightning_3d.shards.tensor import ShardTensor

_Result = TypeVar("_Result")
_ALIGNMENT = 16
_NO_PATHS: Mapping[int, Path] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Plain:
    """A tensor on its way: what it looks like, and where it lies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    on_device: bool

    @property
    def nbytes(self) -> int:
        """With what fills it up."""
        size = torch.Size(self.shape).numel() * self.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Packed:
    """Objects, and what their tensors look like; or how computing them failed."""

    pickled: bytes = b""
    tensors: tuple[_Plain, ...] = ()
    failure: Exception | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """How the ranks of a pipeline tell each other what they computed.

    Attributes:
        group: The ranks.
        rank: This one's place.
        device: This rank's device.
        modules: All modules by name: they are known to every rank.
        tensor_group: What shards are cut over.
    """

    group: dist.ProcessGroup
    rank: int
    device: torch.device
    modules: Mapping[str, nn.Module]
    tensor_group: ShardGroup | None
    names: dict[nn.Module, str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", {module: name for name, module in self.modules.items()})

    def send(
        self, compute: Callable[[], _Result], *, paths: Callable[[], Mapping[int, Path]] = lambda: _NO_PATHS
    ) -> _Result:
        """Computes something, hands it to the other ranks and returns it.

        Args:
            compute: Computes it. What it raises is raised by all ranks.
            paths: Called afterwards: objects that the other ranks have, by identity, and where they find them.
        """
        try:
            result = compute()
            packed, tensors = self._pack(result, paths())
        except Exception as failure:
            self._tell(_Packed(failure=_portable(failure)), self.rank)
            raise
        self._tell(packed, self.rank)
        if tensors:
            buffer = torch.zeros(sum(each.nbytes for each in packed.tensors), dtype=torch.uint8, device=self.device)
            for part, tensor in zip(self._parts(buffer, packed.tensors), tensors, strict=True):
                part.copy_(tensor)
            dist.broadcast(buffer, group=self.group, group_src=self.rank)
        return result

    def receive(self, source: int, *, at: Callable[[Path], Any] | None = None) -> Any:
        """Returns what another rank computes, or raises what it raised.

        Args:
            source: Its place on the pipeline axis.
            at: Returns what lies at a path here.
        """
        packed = self._tell(None, source)
        if packed.failure is not None:
            raise packed.failure
        tensors: list[Tensor] = []
        if packed.tensors:
            buffer = torch.empty(sum(each.nbytes for each in packed.tensors), dtype=torch.uint8, device=self.device)
            dist.broadcast(buffer, group=self.group, group_src=source)
            tensors = [
                _own(part, plain)
                for part, plain in zip(self._parts(buffer, packed.tensors), packed.tensors, strict=True)
            ]
        return _Unpickler(packed.pickled, tensors, self, at).load()

    def agree(self, value: object) -> list[Any]:
        """Returns the values of all ranks."""
        found: list[Any] = [None] * self.group.size()
        dist.all_gather_object(found, value, group=self.group)
        return found

    def _tell(self, packed: _Packed | None, source: int) -> _Packed:
        told = [packed]
        dist.broadcast_object_list(told, group=self.group, group_src=source, device=self.device)
        assert told[0] is not None
        return told[0]

    def _pack(self, result: Any, paths: Mapping[int, Path]) -> tuple[_Packed, list[Tensor]]:
        file = io.BytesIO()
        pickler = _Pickler(file, self.names, paths)
        pickler.dump(result)
        plains = tuple(
            _Plain(tuple(tensor.shape), tensor.dtype, wants, tensor.device.type != "cpu")
            for tensor, wants in pickler.tensors
        )
        return _Packed(file.getvalue(), plains), [tensor for tensor, _ in pickler.tensors]

    def _parts(self, buffer: Tensor, plains: Sequence[_Plain]) -> list[Tensor]:
        parts, start = [], 0
        for plain in plains:
            size = torch.Size(plain.shape).numel() * plain.dtype.itemsize
            parts.append(buffer[start : start + size].view(plain.dtype).view(plain.shape))
            start += plain.nbytes
        return parts


class _Pickler(pickle.Pickler):
    """Leaves out what travels in another way: tensors, modules, and what the other ranks have."""

    def __init__(self, file: io.BytesIO, modules: Mapping[nn.Module, str], paths: Mapping[int, Path]) -> None:
        super().__init__(file)
        self.tensors: list[tuple[Tensor, bool]] = []
        self._modules = modules
        self._paths = paths
        self._known: dict[int, Any] = {}

    def persistent_id(self, value: Any) -> Any:
        """Returns how a value is found again; None for what is pickled."""
        if isinstance(value, nn.Module):
            return ("module", self._modules[value]) if value in self._modules else None
        if id(value) in self._paths:
            return "path", self._paths[id(value)]
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._known:
            self._known[id(value)] = self._tensor(value)
        return self._known[id(value)]

    def _tensor(self, value: Tensor) -> Any:
        wants = value.requires_grad
        if isinstance(value, PartialTensor):
            value = value.share
        cut = (value._dim, value._segments) if isinstance(value, ShardTensor) else None
        local: Tensor = value._local if isinstance(value, ShardTensor) else value
        self.tensors.append((local.detach(), wants))
        return "tensor", len(self.tensors) - 1, cut


class _Unpickler(pickle.Unpickler):
    """Finds again what was left out."""

    def __init__(
        self, pickled: bytes, tensors: Sequence[Tensor], exchange: Exchange, at: Callable[[Path], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors
        self._exchange = exchange
        self._at = at
        self._shards: dict[int, Tensor] = {}

    def persistent_load(self, found: Any) -> Any:
        """Returns a value that was left out."""
        kind, key = found[:2]
        if kind == "module":
            return self._exchange.modules[key]
        if kind == "path":
            assert self._at is not None
            return self._at(key)
        if found[2] is None:
            return self._tensors[key]
        if key not in self._shards:
            group = self._exchange.tensor_group
            assert group is not None, "shards are cut over the tensor axis"
            self._shards[key] = WatchedShard(self._tensors[key], *found[2], group)
        return self._shards[key]


def _own(part: Tensor, plain: _Plain) -> Tensor:
    """A tensor on memory of its own, to which code may write as it may to a result."""
    value = part.clone() if plain.on_device or part.device.type == "cpu" else part.cpu()
    return value.requires_grad_().clone() if plain.requires_grad and torch.is_grad_enabled() else value


def _portable(failure: Exception) -> Exception:
    """The failure itself, or one that says the same if it cannot travel."""
    try:
        again = pickle.loads(pickle.dumps(failure))
    except Exception:
        return RuntimeError(f"{type(failure).__name__}: {failure}")
    return failure if str(again) == str(failure) else RuntimeError(f"{type(failure).__name__}: {failure}")
