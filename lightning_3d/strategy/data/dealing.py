"""Which samples of a loader a data rank reads: its part of every batch that one device would read, in that order."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch import Trainer
from lightning.pytorch.overrides.distributed import _IndexBatchSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, SequentialSampler

from lightning_3d.errors import BatchError

Item = TypeVar("Item")


class LoaderDealer:
    """Deals loaders out to the data ranks, in the place of the samplers that Lightning would put into them.

    Lightning's shuffle every training loader, whatever order its user has chosen, and give each rank every n-th sample.
    Here the user's own sampler says the order, and data rank r of n reads the r-th of n parts of every batch: all
    together read in every step what one device reads with batches n times as large.

    Args:
        ranks: Number of data ranks.
        rank: This one.
        drawing_alike: Inside, random numbers of all data ranks are the same; entering is a collective.
    """

    def __init__(self, ranks: int, rank: int, drawing_alike: Callable[[], AbstractContextManager[None]]) -> None:
        self._ranks, self._rank = ranks, rank
        self._drawing_alike = drawing_alike
        self._wanted: bool | None = None

    def take_over(self, trainer: Trainer) -> None:
        """Has a Trainer leave samplers to this dealer, unless its user has said that there should be none."""
        connector = trainer._accelerator_connector
        if self._wanted is None:
            self._wanted = connector.use_distributed_sampler
        connector.use_distributed_sampler = False

    def deal(self, loader: object, stage: str, *, fill: bool) -> object:
        """Returns this rank's part of a loader; the loader itself where its user deals it out.

        Args:
            loader: As the user has made it.
            stage: What it is for, as text for errors.
            fill: Whether all ranks get equally many samples, by some that are read twice.

        Raises:
            BatchError: It has fewer samples than there are data ranks.
        """
        if isinstance(loader, DataLoader):
            # Augmentation in workers must be equal inside a model group and differ between data ranks.
            _auto_add_worker_init_fn(loader, self._rank)
        if self._ranks == 1 or not self._wanted or not isinstance(loader, DataLoader):
            return loader
        if isinstance(loader.dataset, IterableDataset) or isinstance(loader.sampler, DistributedSampler):
            return loader
        _check_enough(loader, self._ranks, stage)
        twin = copy.copy(loader)
        given: Any = loader.batch_sampler
        tracked = isinstance(given, _IndexBatchSamplerWrapper)
        batches = given._batch_sampler if tracked else given
        if batches is None:
            vars(twin).update(sampler=self._samples(loader.sampler, 1, fill=fill, whole=False), _iterator=None)
            return twin
        dealt: Any
        sampler: Any
        if type(batches) is BatchSampler:
            sampler = self._samples(batches.sampler, batches.batch_size, fill=fill, whole=batches.drop_last)
            dealt = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        else:
            sampler = loader.sampler
            dealt = DealtBatches(batches, self._ranks, self._rank, fill=fill, drawing_alike=self._drawing_alike)
        vars(twin).update(
            sampler=sampler, batch_sampler=_IndexBatchSamplerWrapper(dealt) if tracked else dealt, _iterator=None
        )
        return twin

    def _samples(self, sampler: Any, batch_size: int, *, fill: bool, whole: bool) -> DealtSamples:
        drawing: dict[str, Any] = {"fill": fill, "drawing_alike": self._drawing_alike}
        return DealtSamples(sampler, self._ranks, self._rank, batch_size=batch_size, whole=whole, **drawing)


class _Dealt(Sampler[Any]):
    """One rank's part of what a sampler yields.

    Args:
        inner: The user's sampler, of samples or of batches.
        ranks: Number of data ranks.
        rank: This one.
        fill: Whether all ranks get equally many, by some that are read twice.
        drawing_alike: Inside, random numbers of all data ranks are the same.
    """

    def __init__(
        self,
        inner: Iterable[Any],
        ranks: int,
        rank: int,
        *,
        fill: bool,
        drawing_alike: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.inner = inner
        self._ranks, self._rank, self._fill = ranks, rank, fill
        self._drawing_alike = drawing_alike

    def set_epoch(self, epoch: int) -> None:
        """Tells the user's sampler the epoch, if it wants to know."""
        set_epoch = getattr(self.inner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)

    def _rounds(self, size: int, *, whole: bool = False) -> Iterator[list[Any]]:
        """Yields what all ranks together read at a time; with ``whole``, not the rest at the end."""
        items = iter(self.inner)
        if isinstance(self.inner, SequentialSampler):
            first = list(itertools.islice(items, size))
        else:
            # Samplers draw their order with their first item, from generators that other ranks may have used otherwise.
            with self._drawing_alike():
                first = list(itertools.islice(items, size))
        batch, beginning = first, first[: self._ranks]
        while len(batch) == size or (batch and not whole):
            missing = -len(batch) % self._ranks if self._fill else 0
            yield batch + list(itertools.islice(itertools.cycle(beginning), missing))
            batch = list(itertools.islice(items, size))

    def _count(self) -> int:
        return len(cast(Sized, self.inner))


class DealtSamples(_Dealt):
    """The samples of one rank: the part at its place of each batch of all ranks.

    Args:
        inner: The user's sampler.
        ranks: Number of data ranks.
        rank: This one.
        batch_size: Samples in the batch of one rank.
        whole: Whether a last batch that is short is left out.
        options: See `_Dealt`.
    """

    def __init__(
        self, inner: Iterable[Any], ranks: int, rank: int, *, batch_size: int, whole: bool = False, **options: Any
    ) -> None:
        super().__init__(inner, ranks, rank, **options)
        self._batch_size, self._whole = batch_size, whole

    def __iter__(self) -> Iterator[Any]:
        """Yields this rank's samples."""
        for batch in self._rounds(self._batch_size * self._ranks, whole=self._whole):
            yield from self._part(batch)

    def __len__(self) -> int:
        """Returns how many samples this rank reads."""
        batches, rest = divmod(self._count(), self._batch_size * self._ranks)
        last = range(0 if self._whole else rest + (-rest % self._ranks if self._fill else 0))
        return batches * self._batch_size + len(self._part(last))

    def _part(self, batch: Any) -> Any:
        begin, end = (-(-len(batch) * rank // self._ranks) for rank in (self._rank, self._rank + 1))
        return batch[begin:end]


class DealtBatches(_Dealt):
    """The batches of one rank where the user's own batch sampler makes them: each rank gets whole ones, in turn."""

    def __iter__(self) -> Iterator[Any]:
        """Yields this rank's batches."""
        for batches in self._rounds(self._ranks):
            yield from batches[self._rank : self._rank + 1]

    def __len__(self) -> int:
        """Returns how many batches this rank reads."""
        whole, rest = divmod(self._count(), self._ranks)
        return whole + (rest > 0 if self._fill else rest > self._rank)


def _check_enough(loader: DataLoader[Any], ranks: int, stage: str) -> None:
    samples = len(cast(Sized, loader.dataset)) if isinstance(loader.dataset, Sized) else None
    if samples is not None and 0 < samples < ranks:
        raise BatchError(
            f"the {stage} dataset has {samples} samples for {ranks} data ranks.",
            valid=f"{ranks} samples or more, or a data degree of at most {samples}",
            fix="a larger dataset or fewer devices",
        )
