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
from lightning.fabric.utilities.data import _auto_add_worker_init_fn, sized_len
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.overrides.distributed import (
    UnrepeatedDistributedSampler,
    UnrepeatedDistributedSamplerWrapper,
)
from lightning.pytorch.utilities.data import _update_dataloader
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from lightning_3d.errors import BatchError
from lightning_3d.graph.calls import shadow
from lightning_3d.graph.quiet import quiet
from lightning_3d.log import get_logger
from lightning_3d.strategy.collectives import DataCollectives

_logger = get_logger(__name__)
_NO_BATCH = object()


class LoaderEnds:
    """Keeps the data ranks together at the ends of their loaders.

    Args:
        collectives: Reductions over the data axis.
        uneven: "stop" or "error", for training loaders that end unevenly.
    """

    def __init__(self, collectives: DataCollectives, uneven: str) -> None:
        self._collectives = collectives
        self._error = uneven == "error"
        self._own: list[float] = []
        self._missing: list[int] = []
        self._done = 0

    @property
    def _alone(self) -> bool:
        return self._collectives.data.size() == 1

    # ---- loaders ----

    def process(self, loader: object, trainer: Trainer, repeat: Callable[[Any, int], None]) -> object:
        """Returns the loader to use in place of the user's.

        Args:
            loader: One loader, its sampler set by Lightning.
            trainer: Says for which stage it is.
            repeat: Runs a batch of an evaluation again, unseen; used where a loader does not know its length.
        """
        if isinstance(loader, DataLoader):
            # Augmentation in workers must be equal inside a model group and differ between data ranks.
            _auto_add_worker_init_fn(loader, self._collectives.data.rank())
        if self._alone:
            return loader
        length = sized_len(loader)
        if not trainer.training:
            return _AgreedLoader(loader, self, repeat) if length is None else _without_repeats(loader, trainer)
        if length is None:
            return _AgreedLoader(loader, self, None)
        return self._of_equal_length(loader, length)

    def has_batch(self, here: bool, *, training: bool) -> bool:
        """Returns whether the data ranks go on together: all must have a batch in training, one in evaluation.

        Raises:
            BatchError: Training ends unevenly and ``uneven="error"``.
        """
        ranks = self._collectives.data.size()
        count = self._collectives.total(int(here))
        if not training or count in (0, ranks):
            return count > 0
        self._report(f"{ranks - count} of {ranks} data ranks have no batch left.")
        return False

    def _of_equal_length(self, loader: object, length: int) -> object:
        shortest, longest = self._collectives.smallest([length])[0], self._collectives.largest([length])[0]
        if shortest == longest:
            return loader
        self._report(f"training loaders have {shortest} to {longest} batches on the data ranks.")
        return _ShortLoader(loader, shortest)

    def _report(self, fact: str) -> None:
        if self._error:
            raise BatchError(fact, valid="as many batches on every data rank", fix='uneven="stop", or even shards')
        if self._collectives.data.rank() == 0:
            _logger.warning("%s All stop together at the shortest.", fact)

    # ---- evaluation ----

    def begin_evaluation(self, trainer: Trainer) -> None:
        """Agrees on how many batches each data rank misses in each loader of the evaluation that begins."""
        if self._alone:
            return
        loop: Any = trainer._active_loop
        limits = loop.max_batches
        self._done = 0
        self._own = list(limits) if isinstance(limits, Sequence) else [limits]
        known = [0 if own == float("inf") else int(own) for own in self._own]
        most = self._collectives.largest(known)
        fewest = self._collectives.smallest(known)
        self._missing = [longest - own for longest, own in zip(most, known, strict=True)]
        if most != fewest:
            self._collectives.weight = 1.0

    def end_evaluation(self) -> None:
        """Forgets the evaluation that ended."""
        self._missing = []
        self._collectives.weight = None

    def repeats_after_step(self) -> int:
        """Counts one step, and returns how often its batch must run again, unseen, while other ranks have more."""
        self._done += 1
        # Loaders follow one another, so the end of each is a number of steps.
        ends = itertools.accumulate(self._own)
        return sum(missing for end, missing in zip(ends, self._missing, strict=False) if end == self._done)

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
        """Takes part in the reduction of a value that is synchronised at every step; logs nothing."""
        if options.get("sync_dist") and options.get("on_step") and isinstance(value, (int, float, Tensor)):
            tensor = torch.as_tensor(value, dtype=torch.get_default_dtype())
            self._collectives.reduce(tensor, options.get("sync_dist_group"), options.get("reduce_fx", "mean"))


class _ShortLoader:
    """A loader that ends early; everything else is the loader's own."""

    def __init__(self, loader: Any, length: int) -> None:
        self._loader = loader
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._loader), self._length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _AgreedLoader:
    """A loader of unknown length whose data ranks ask each other before every batch."""

    def __init__(self, loader: Any, ends: LoaderEnds, repeat: Callable[[Any, int], None] | None) -> None:
        self._loader = loader
        self._ends = ends
        self._repeat = repeat

    def __iter__(self) -> Iterator[Any]:
        last: Any = _NO_BATCH
        iterator = iter(self._loader)
        for index in itertools.count():
            batch = next(iterator, _NO_BATCH)
            here = batch is not _NO_BATCH
            if not self._ends.has_batch(here, training=self._repeat is None):
                return
            if here:
                last = batch
                yield batch
            elif last is _NO_BATCH:
                raise BatchError("this data rank has no batch at all, other ranks have some.", valid="1 batch or more")
            else:
                assert self._repeat is not None
                self._repeat(last, index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def check_enough_samples(loader: object, ranks: int, stage: str) -> None:
    """Refuses a dataset that is shared out to more data ranks than it has samples.

    Raises:
        BatchError: With both numbers.
    """
    if not isinstance(loader, DataLoader) or not isinstance(loader.sampler, DistributedSampler):
        return
    samples = sized_len(loader.dataset)
    if samples is not None and 0 < samples < ranks:
        raise BatchError(
            f"the {stage} dataset has {samples} samples for {ranks} data ranks.",
            valid=f"{ranks} samples or more, or a data degree of at most {samples}",
            fix="a larger dataset or fewer devices",
        )


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
