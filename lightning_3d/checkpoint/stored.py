"""A tensor whose values are still on the disk: it stands in a state, and is read when it is written elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_3d.checkpoint.sources import TensorSource
from lightning_3d.errors import CheckpointError

_aten = torch.ops.aten
# What a save does to a tensor that lies on the CPU already.
_NOTHING = (_aten.detach.default, _aten.alias.default, _aten._to_copy.default)


class StoredTensor(Tensor):
    """A whole tensor of a source, without memory of its own.

    It speaks the protocol of torch.distributed.checkpoint for sharded tensors, as one part that is the whole; so a save
    holds one such tensor in memory at a time.

    Args:
        source: What it lies in.
        key: Its name there.
        cut: Whether ranks held parts of it when it was saved.
    """

    source: TensorSource
    key: str
    cut: bool

    def __new__(cls, source: TensorSource, key: str, cut: bool = False) -> StoredTensor:
        """Makes a tensor without memory."""
        form = source.forms[key]
        return Tensor._make_wrapper_subclass(cls, form.shape, dtype=form.dtype, device=torch.device("cpu"))

    def __init__(self, source: TensorSource, key: str, cut: bool = False) -> None:
        self.source, self.key, self.cut = source, key, cut

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _NOTHING and (kwargs or {}).get("dtype", args[0].dtype) == args[0].dtype:
            return args[0]
        raise CheckpointError(
            f"{func.overloadpacket} needs the values of {args[0].key}, which is still on the disk", fix="read it first"
        )

    def read(self) -> Tensor:
        """Returns its values, in memory of their own."""
        return self.source.whole(self.key)

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        (chunk,) = self.__create_chunk_list__()
        data = TensorWriteData(chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.shape)
        return [WriteItem(index=MetadataIndex(fqn, chunk.offsets), type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size([0] * self.dim()), self.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        # The writer keeps all tensors of a file to its end, though it has written one when it asks for the next.
        if self.source.lent is not None:
            self.source.lent.untyped_storage().resize_(0)
        self.source.lent = self.read()
        return self.source.lent

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredTensor({self.key}, {tuple(self.shape)}, {self.dtype})"
