"""Where data ends: training stops on all data ranks together, evaluation repeats no sample in a result.

In evaluation some data ranks have one batch less. They run their last one again while the others run theirs, so that
collectives stay in step, but nothing of it is seen: no hook, no log, no metric, no output.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
)
from lightning.pytorch.utilities.data import _update_dataloader
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_3d.batches.loaders import LoaderInPlace
from lightning_3d.batches.logs import log_options, reduction_name
from lightning_3d.checkpoint.agreement import gather
from lightning_3d.errors import BatchError
from lightning_3d.faults.report import grouped
from lightning_3d.graph.calls import shadow
from lightning_3d.graph.quiet import quiet
from lightning_3d.log import get_logger
from lightning_3d.strategy.logging.collectives import DataCollectives

_logger = get_logger(__name__)
_NO_BATCH = object()
# Runs a batch of an evaluation again, unseen: the batch, and its index with, for several loaders, theirs.
Repeat = Callable[[Any, tuple[int, ...]], None]


class LoaderEnds:
    """Keeps the data ranks together at the ends of their loaders.

    Args:
        collectives: Reductions over the data axis.
        uneven: "stop" or "error", for training loaders that end unevenly.
        alike: Makes a loader give the same on all ranks of one position of the data axis.
    """

    def __init__(self, collectives: DataCollectives, uneven: str, alike: Callable[[Any], Any]) -> None:
        self._collectives = collectives
        self._alike = alike
        self._error = uneven == "error"
        self._own: list[float] = []
        self._missing: list[int] = []

    @property
    def _alone(self) -> bool:
        return self._collectives.data.size() == 1

    # ---- loaders ----

    def process(self, loader: object, trainer: Trainer, repeat: Repeat) -> object:
        """Returns the loader to use in place of the user's.

        Args:
            loader: One loader, its sampler set by Lightning.
            trainer: Says for which stage it is.
            repeat: Runs a batch of an evaluation again, unseen; used where a loader does not know its length.
        """
        if self._alone:
            return self._alike(loader)
        if sized_len(loader) is None:
            return _AgreedLoader(self._alike(loader), self, trainer, None if trainer.training else repeat)
        if trainer.training:
            return self._of_equal_length(self._alike(loader), sized_len(loader) or 0)
        loader = _without_repeats(loader, trainer)
        self._extremes(sized_len(loader) or 0)
        return self._alike(loader)

    def has_batch(self, here: bool, *, training: bool, first: bool) -> bool:
        """Returns whether the data ranks go on together: all must have a batch in training, one in evaluation.

        Args:
            here: Whether this rank has one.
            training: For which of the two.
            first: Nothing was taken from the loader yet.

        Raises:
            BatchError: Training ends unevenly and ``uneven="error"``, or some ranks have nothing from the start.
        """
        ranks = self._collectives.data.size()
        count = self._collectives.total(int(here))
        if count in (0, ranks):
            return count > 0
        if first:
            raise _nothing_on_some(ranks - count, ranks)
        if training:
            self._report(f"{ranks - count} of {ranks} data ranks have no batch left.")
        return not training

    def _extremes(self, length: int) -> tuple[int, int]:
        """The lengths of the shortest and the longest loader of the data ranks."""
        shortest, longest = self._collectives.smallest([length])[0], self._collectives.largest([length])[0]
        if shortest == 0 < longest:
            ranks = self._collectives.data.size()
            raise _nothing_on_some(self._collectives.total(int(length == 0)), ranks)
        return shortest, longest

    def _of_equal_length(self, loader: object, length: int) -> object:
        shortest, longest = self._extremes(length)
        if shortest == longest:
            return loader
        told = ", ".join(
            f"{count} on {ranks}"
            for count, ranks in grouped(
                {rank: str(each) for rank, each in enumerate(gather(self._collectives.data, length))}
            )
        )
        self._report(f"training loaders have {shortest} to {longest} batches on the data ranks: {told}.")
        return _ShortLoader(loader, shortest)

    def _report(self, fact: str) -> None:
        if self._error:
            raise BatchError(fact, valid="as many batches on every data rank", fix='uneven="stop", or even shards')
        if self._collectives.data.rank() == 0:
            _logger.warning("%s All stop together at the shortest.", fact)

    # ---- evaluation ----

    def begin_evaluation(self, trainer: Trainer) -> None:
        """Agrees on how many batches each data rank misses in each loader of the evaluation that begins.

        Raises:
            BatchError: Loaders of unknown length stand beside others that end unevenly.
        """
        if self._alone:
            return
        loop: Any = trainer._active_loop
        self._own = _batches_by_loader(loop)
        known = [0 if own == float("inf") else int(own) for own in self._own]
        most = self._collectives.largest(known)
        fewest = self._collectives.smallest(known)
        self._missing = [longest - own for longest, own in zip(most, known, strict=True)]
        streams = any(isinstance(each, _AgreedLoader) for each in loop._combined_loader.flattened)
        if streams and most != fewest:
            raise BatchError(
                f"loaders have {fewest} to {most} batches on the data ranks, and another one does not know its length.",
                valid="as many batches on every data rank beside a loader of unknown length",
                fix="a __len__ for each loader, or evaluation in two calls",
            )
        if streams or most != fewest:
            self._collectives.weight = 1.0

    def end_evaluation(self) -> None:
        """Forgets the evaluation that ended."""
        self._missing = []
        self._collectives.weight = None

    def repeats_after(self, batch_idx: int, dataloader_idx: int = 0) -> int:
        """Returns how often a batch must run again, unseen, while other ranks have more."""
        if not self._missing or batch_idx + 1 != self._own[dataloader_idx]:
            return 0
        return self._missing[dataloader_idx]

    @contextmanager
    def unseen(self, module: LightningModule) -> Iterator[None]:
        """Context for running a batch again: it takes part in collectives, with weight 0, and leaves no trace."""
        before = self._collectives.weight
        self._collectives.weight = 0.0
        put_log_back = shadow(module, "log", self._log_nothing)
        try:
            with quiet(module, keep_log=True):
                yield
        finally:
            put_log_back()
            self._collectives.weight = before

    def _log_nothing(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Takes part in the reduction of a value over ranks of the user's at every step; logs nothing."""
        given = log_options(args, options)
        if given.get("sync_dist_group") is None:
            return
        if given.get("sync_dist") and given.get("on_step") and isinstance(value, (int, float, Tensor)):
            tensor = torch.as_tensor(value)
            if tensor.dtype not in (torch.float32, torch.float64):
                # What Lightning reduces on the other ranks.
                tensor = tensor.to(torch.get_default_dtype())
            operation = reduction_name(given.get("reduce_fx", "mean"))
            self._collectives.reduce(tensor.squeeze(), given.get("sync_dist_group"), operation)


class _ShortLoader(LoaderInPlace):
    """A loader that ends early; everything else is the loader's own."""

    def __init__(self, loader: Any, length: int) -> None:
        super().__init__(loader, _length=length)

    def __len__(self) -> int:
        return int(self._length)

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), self._length)


class _AgreedLoader(LoaderInPlace):
    """A loader of unknown length whose data ranks ask each other before every batch."""

    def __init__(self, loader: Any, ends: LoaderEnds, trainer: Trainer, repeat: Repeat | None) -> None:
        super().__init__(loader, _ends=ends, _trainer=trainer, _repeat=repeat)

    def __iter__(self) -> Iterator[Any]:
        last: Any = None
        iterator = iter(self._loader)
        number, limit = self._place()
        for index in itertools.count():
            # Nobody asks for more than the limit, so a rank that ended before must not either.
            if index >= limit:
                return
            batch = next(iterator, _NO_BATCH)
            here = batch is not _NO_BATCH
            if not self._ends.has_batch(here, training=self._repeat is None, first=index == 0):
                return
            if here:
                last = batch
                yield batch
            else:
                assert self._repeat is not None
                self._repeat(last, (index, *number))

    def _place(self) -> tuple[tuple[int, ...], float]:
        """The number of this loader, if it is one of several in evaluation, and how many batches of it are used."""
        if self._repeat is None:
            return (), float("inf")
        loop: Any = self._trainer._active_loop
        combined = loop._combined_loader
        number = next(index for index, each in enumerate(combined.flattened) if each is self)
        several = combined._mode == "sequential" and len(combined.flattened) > 1
        limit = float("inf") if combined.limits is None else combined.limits[number]
        return (number,) if several else (), limit


def _nothing_on_some(count: int, ranks: int) -> BatchError:
    return BatchError(
        f"{count} of {ranks} data ranks have no batch at all, the others have some.",
        valid="1 batch or more on every data rank",
        fix="share the data out in other parts, or use fewer devices",
    )


def _batches_by_loader(loop: Any) -> list[float]:
    """How many batches this rank runs of each loader; of all together where one batch holds something of each."""
    limits = loop.max_batches
    each = list(limits) if isinstance(limits, Sequence) else [limits]
    together = {"min_size": min, "max_size": max, "max_size_cycle": max}.get(loop._combined_loader._mode)
    return each if together is None else [together(each)]


def _without_repeats(loader: object, trainer: Trainer) -> object:
    """The loader with a sampler that does not fill up the last batches with samples that others have as well."""
    if not isinstance(loader, DataLoader) or type(loader.sampler) not in (
        DistributedSampler,
        DistributedSamplerWrapper,
    ):
        return loader
    padded: Any = loader.sampler
    options = {"num_replicas": padded.num_replicas, "rank": padded.rank, "shuffle": padded.shuffle, "seed": padded.seed}
    sampler: DistributedSampler[Any]
    if isinstance(padded, DistributedSamplerWrapper):
        inner: Any = padded.dataset
        sampler = UnrepeatedDistributedSamplerWrapper(inner._sampler, **options)
    else:
        sampler = UnrepeatedDistributedSampler(padded.dataset, **options)
    return _update_dataloader(loader, sampler, mode=trainer.state.stage)
