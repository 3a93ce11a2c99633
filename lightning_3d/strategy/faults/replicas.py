"""What must be equal on several ranks: made equal where nobody says it, and compared where the user asks."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_flatten

from lightning_3d.batches.loaders import LoaderInPlace
from lightning_3d.checkpoint.agreement import gather
from lightning_3d.errors import BatchError, CheckpointError, ModuleError
from lightning_3d.faults.report import grouped

# Batches after which it is known whether a loader draws in this process; the first one may have been taken before.
_LOOKED_AT = 2


def share_generators(group: dist.ProcessGroup) -> None:
    """Gives every rank of a group the random states of its first: Python's, NumPy's and torch's on the CPU.

    Ranks that compute one sample together must draw the same, also where the user has seeded nothing. A collective.

    Args:
        group: Ranks that see the same samples.
    """
    if group.size() == 1:
        return
    states: list[Any] = [_collect_rng_states(include_cuda=False)]
    dist.broadcast_object_list(states, group_src=0, group=group)
    _set_rng_states(states[0])


@contextmanager
def drawing_alike(group: dist.ProcessGroup) -> Iterator[None]:
    """Inside, every rank of a group draws what its first rank draws.

    Afterwards ranks whose generators stood elsewhere have them back where they were. Entering is a collective.

    Args:
        group: Ranks that must draw the same.
    """
    own = _states()
    generators = _collect_rng_states(include_cuda=False)
    share_generators(group)
    same = own == _states()
    try:
        yield
    finally:
        if not same:
            _set_rng_states(generators)


def alike(loader: Any, group: dist.ProcessGroup) -> Any:
    """Returns a loader that gives the same on every rank of a group, also where one rank draws numbers of its own.

    Args:
        loader: Any iterable of batches.
        group: Ranks that see the same samples.
    """
    return loader if group.size() == 1 else _AlikeLoader(loader, group)


class _AlikeLoader(LoaderInPlace):
    """A loader whose ranks draw the same numbers for an order, for workers, and for batches; else the loader itself."""

    def __init__(self, loader: Any, group: dist.ProcessGroup) -> None:
        super().__init__(loader, _group=group)

    def __iter__(self) -> Iterator[Any]:
        share_generators(self._group)
        return self._batches(iter(self._loader))

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        draws, before = False, _states()
        for index, batch in enumerate(batches):
            if index < _LOOKED_AT:
                # All decide alike, so that none waits for the others alone.
                draws = any(gather(self._group, draws or before != _states()))
            yield batch
            if draws:
                share_generators(self._group)
            if index < _LOOKED_AT:
                before = _states()


def _states() -> tuple[Any, ...]:
    """What changes when something draws a number."""
    numpy: Any = np.random.get_state()
    return random.getstate(), numpy[1].tobytes(), numpy[2:], torch.get_rng_state().numpy().tobytes()


class ReplicaCheck:
    """Compares what the ranks of a group hold.

    Args:
        group: Ranks that must hold the same.
        ranks: Their global ranks, in order.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: tuple[int, ...]) -> None:
        self._group = group
        self._ranks = ranks

    def batch(self, batch: Any, index: int) -> None:
        """Compares the batches of a step. A collective.

        Raises:
            BatchError: Names the ranks that differ from the first.
        """
        different = self._unlike_first(gather(self._group, batch_digest(batch)))
        if different:
            raise BatchError(
                f"batch {index} differs on model-parallel ranks {_listed(different)} from rank {self._ranks[0]}; "
                "they compute one sample together.",
                fix="shard samplers by strategy.data_rank, and draw random numbers in datasets from torch's or NumPy's "
                "seeded generators",
            )

    def lengths(self, loader: object, stage: str) -> None:
        """Compares how many batches the loaders of a stage have. A collective.

        Raises:
            BatchError: Names the ranks and their lengths.
        """
        self._compare(
            "batches",
            str(sized_len(loader)),
            f"the {stage} loader has",
            fix="make the same dataset on all of them; the strategy gives samples to data ranks",
        )

    def shapes(self, batch: Any) -> None:
        """Compares the structure and the shapes of first batches. A collective.

        Raises:
            BatchError: Names the ranks and what they have.
        """
        shown = ", ".join(map(_shape, tree_flatten(batch)[0]))
        self._compare("", shown, "the first batch is", fix="shard samplers by strategy.data_rank, not by the rank")

    def _compare(self, unit: str, value: str, has: str, *, fix: str) -> None:
        if self._group.size() == 1:
            return
        found = dict(zip(self._ranks, gather(self._group, value), strict=True))
        if len(set(found.values())) > 1:
            told = ", ".join(f"{each} {unit}".strip() + f" on {ranks}" for each, ranks in grouped(found))
            raise BatchError(f"ranks that compute one sample together differ: {has} {told}.", fix=fix)

    def tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Compares what every rank should hold alike: replicated parameters and buffers. A collective.

        Args:
            tensors: Parameters and buffers by name; those cut over the last axis of their mesh, and those that other
                pipeline ranks hold, are left out.

        Raises:
            ModuleError: Names the first that differs, and the ranks.
        """
        digests = {name: _tensor_digest(_local(tensor)) for name, tensor in tensors if not _apart(tensor)}
        of_ranks = gather(self._group, digests)
        for name in digests:
            different = self._unlike_first([each[name] for each in of_ranks])
            if different:
                raise ModuleError(
                    f"'{name}' differs on tensor-parallel ranks {_listed(different)} from rank {self._ranks[0]}.",
                    fix="look for random numbers or branches that depend on the rank",
                )

    def _unlike_first(self, digests: Sequence[bytes]) -> list[int]:
        return [rank for rank, digest in zip(self._ranks, digests, strict=True) if digest != digests[0]]


def check_same_checkpoint(path: object, step: object, content: Any, group: dist.ProcessGroup) -> None:
    """Refuses to put a state together from different checkpoints, which nodes may have on disks of their own.

    Every rank calls it.

    Args:
        path: Where each rank has opened one.
        step: Of which step it is.
        content: What is in every copy of it, and in no other.
        group: All ranks.

    Raises:
        CheckpointError: On every rank, with the steps.
    """
    seen = gather(group, (batch_digest((step, content)), step))
    different = {rank: str(found) for rank, (digest, found) in enumerate(seen) if digest != seen[0][0]}
    if different:
        others = ", ".join(f"of step {found} on {ranks}" for found, ranks in grouped(different))
        raise CheckpointError(
            f"{path} is not the same checkpoint on all nodes: of step {seen[0][1]} on rank 0, {others}.",
            fix="load one that all nodes have, or copy that of one node to the others",
        )


def batch_digest(batch: Any) -> bytes:
    """Returns a digest of a batch: structure, values of tensors and of everything that is plain."""
    leaves, structure = tree_flatten(batch)
    digest = hashlib.blake2b(str(structure).encode(), digest_size=16)
    for leaf in leaves:
        digest.update(_tensor_digest(leaf) if isinstance(leaf, Tensor) else _plain(leaf).encode())
    return digest.digest()


def _shape(leaf: Any) -> str:
    return f"{tuple(leaf.shape)} of {leaf.dtype}" if isinstance(leaf, Tensor) else type(leaf).__name__


def _plain(leaf: Any) -> str:
    """A value as text; an object, whose text may hold its address, by its class."""
    return repr(leaf) if isinstance(leaf, (bool, int, float, complex, str, bytes, type(None))) else type(leaf).__name__


def _tensor_digest(tensor: Tensor) -> bytes:
    plain = tensor.detach().cpu().contiguous()
    head = f"{plain.dtype} {tuple(plain.shape)}".encode()
    digest = hashlib.blake2b(head, digest_size=16)
    if plain.numel():
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.digest()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _apart(tensor: Tensor) -> bool:
    """Whether the last axis of its mesh, the tensor axis, cuts it, or this rank has nothing of it."""
    if isinstance(tensor, DTensor):
        return not isinstance(tensor.placements[-1], Replicate)
    return tensor.is_meta


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))
