"""Which samples a data rank reads: an order that no number of data ranks changes, and that may start in its middle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_3d.reference.position import Position


class GlobalOrderSampler(DistributedSampler[int]):
    """Deals one global order of samples out to the data ranks, batch by batch.

    The order depends on seed and epoch alone. Global batch k is ``order[k*G : (k+1)*G]`` with G = ``batch_size`` ×
    ``num_replicas``, of which each rank takes its contiguous share. So as long as G stays, the number of data ranks
    changes nothing about what is trained on and when.

    In training the last batch is filled up from the start of the order. In evaluation it stays short and is shared
    out as evenly as possible, so no sample is ever read twice.

    It is a DistributedSampler so that Lightning does not put one of its own in its place.

    Args:
        dataset: The samples.
        batch_size: Samples per batch and data rank.
        num_replicas: Number of data ranks.
        rank: This data rank.
        training: Whether to shuffle, and to fill the last batch up.
        seed: Chooses the orders.
        start: Called with the epoch that the Trainer has set whenever reading begins; returns where to begin.
            None begins at the start of that epoch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        num_replicas: int,
        rank: int,
        training: bool,
        seed: int = 0,
        start: Callable[[int], Position] | None = None,
    ) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=training, seed=seed)
        self.samples = len(cast(Sized, dataset))
        self.batch_size = batch_size
        self.training = training
        self.start = start

    @property
    def global_batch(self) -> int:
        """Samples per batch over all data ranks."""
        return self.batch_size * self.num_replicas

    def __len__(self) -> int:
        """Returns the number of samples that this rank reads in a whole epoch, wherever it begins."""
        whole, rest = divmod(self.samples, self.global_batch)
        if self.training:
            return (whole + (rest > 0)) * self.batch_size
        return whole * self.batch_size + len(self._share(np.arange(rest)))

    def __iter__(self) -> Iterator[int]:
        """Yields this rank's samples from where ``start`` says to the end of the epoch."""
        begin = Position(seed=self.seed, epoch=self.epoch) if self.start is None else self.start(self.epoch)
        order = self.order(begin.seed, begin.epoch)
        for first in range(begin.samples, len(order), self.global_batch):
            yield from self._share(order[first : first + self.global_batch]).tolist()

    def order(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """Returns the samples of an epoch over all data ranks, in the order of reading."""
        if not self.training:
            return np.arange(self.samples)
        order = np.random.default_rng([seed, epoch]).permutation(self.samples)
        return np.resize(order, -(-self.samples // self.global_batch) * self.global_batch)

    def _share(self, batch: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        size = len(batch)
        return batch[size * self.rank // self.num_replicas : size * (self.rank + 1) // self.num_replicas]


class ResumableLoader(DataLoader[Tensor]):
    """A DataLoader that begins to read at the first batch asked for, not when its iterator is made.

    Lightning makes the iterator of a resumed epoch before it has set the epoch, and, when a scheduler asks for the
    number of steps, even before it has loaded the checkpoint. Worker processes that read ahead from then on would
    read the wrong samples.
    """

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        """Yields the batches of the rest of the epoch."""
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing: having the method tells Lightning that mid-epoch resumption is exact.

        The position is part of the data module's state, which is loaded in every case; Lightning loads a loader's
        state only in some.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`state_dict` returns."""
