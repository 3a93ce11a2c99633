"""In how many micro-batches a batch is cut, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_3d.batches.split import slice_sizes, split_batch, split_by_module
from lightning_3d.config.batch import MICROBATCHES_PER_RANK
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import BatchError


class MicroBatches:
    """Cuts the batches of a module.

    Args:
        module: The user's module; its ``split_batch(batch, n)`` cuts if it has one.
        config: The strategy's options.
    """

    def __init__(self, module: LightningModule, config: StrategyConfig) -> None:
        self._own = getattr(module, "split_batch", None)
        self._config = config
        self._pipelined = config.pipeline_parallel_size > 1

    def sizes(self, batch: Any) -> tuple[int, ...]:
        """Returns the samples of each micro-batch; a batch that stays whole counts as one.

        Raises:
            BatchError: The batch has no size, or makes another number of micro-batches than is asked for.
        """
        config = self._config
        asked = config.num_microbatches if isinstance(config.num_microbatches, int) else None
        if config.micro_batch_size is None and (asked == 1 or (asked is None and not self._pipelined)):
            return (1,)
        count = asked or (MICROBATCHES_PER_RANK * config.pipeline_parallel_size if self._pipelined else 1)
        size = self._size(batch)
        if size is None:
            return (1,) * count
        if config.micro_batch_size is None:
            return slice_sizes(size, count)
        by_size = -(-size // config.micro_batch_size)
        if asked is not None and by_size > asked:
            raise BatchError(
                f"a batch of {size} samples makes {by_size} micro-batches of micro_batch_size="
                f"{config.micro_batch_size}, but num_microbatches={asked}.",
                valid=f"num_microbatches={by_size}, or one of the two left out",
            )
        return slice_sizes(size, by_size)

    def split(self, batch: Any, sizes: Sequence[int]) -> list[Any]:
        """Returns the micro-batches of a batch, in order.

        Args:
            batch: What the DataLoader gave.
            sizes: From `sizes`.
        """
        if len(sizes) == 1:
            return [batch]
        return split_by_module(self._own, batch, len(sizes)) if callable(self._own) else split_batch(batch, sizes)

    def first(self, batch: Any) -> Any:
        """Returns the first micro-batch of a batch."""
        return self.split(batch, self.sizes(batch))[0]

    def _size(self, batch: Any) -> int | None:
        """The samples of a batch; None if only the module knows how to cut it."""
        try:
            return int(extract_batch_size(batch))
        except MisconfigurationException as error:
            if callable(self._own) and self._config.micro_batch_size is None:
                return None
            raise BatchError(
                f"no batch size can be found in a batch of type {type(batch).__name__}, so it cannot be cut.",
                valid="tensors with the batch size as first dim, in any mapping, list, tuple or dataclass",
                fix="define split_batch(batch, n) in the module, or num_microbatches=1",
            ) from error
