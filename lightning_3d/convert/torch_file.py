"""One torch file, laid out first and filled afterwards: no more than one tensor is in memory at a time."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import set_default_mmap_options, skip_data
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_3d.checkpoint.sources import TensorSource
from lightning_3d.checkpoint.stored import StoredTensor

# Bytes that are asked of a source at once.
_BATCH = 256 * 2**20


def save_streamed(checkpoint: Any, path: Path) -> None:
    """Writes what ``torch.save`` would, reading StoredTensors when their place in the file is there.

    Args:
        checkpoint: Nested containers with tensors; one that stands in several places is written once.
        path: A file that does not exist yet.
    """
    made: dict[int, Tensor] = {}
    with FakeTensorMode():

        def fake(tensor: Tensor) -> Tensor:
            if id(tensor) not in made:
                made[id(tensor)] = torch.empty(tensor.shape, dtype=tensor.dtype)
            return made[id(tensor)]

        skeleton = tree_map_only(Tensor, fake, checkpoint)
    with skip_data(materialize_fake_tensors=True):
        torch.save(skeleton, path)
    with set_default_mmap_options(mmap.MAP_SHARED):
        mapped = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    pairs = zip(tree_leaves(checkpoint), tree_leaves(mapped), strict=True)
    places = {id(source): (source, target) for source, target in pairs if isinstance(source, Tensor)}
    stored: dict[TensorSource, dict[str, Tensor]] = {}
    for source, target in places.values():
        if isinstance(source, StoredTensor):
            stored.setdefault(source.source, {})[source.key] = target
        else:
            target.copy_(source)
    for tensors, into in stored.items():
        for batch in _batches(into):
            tensors.read(batch)


def _batches(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    batch: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors.items():
        if batch and filled + tensor.nbytes > _BATCH:
            yield batch
            batch, filled = {}, 0
        batch[name] = tensor
        filled += tensor.nbytes
    if batch:
        yield batch
