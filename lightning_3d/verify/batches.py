"""The batches of both runs: taken from the user's loader once, one for each data rank, joined for one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lightning_3d.batches.micro import MicroBatches
from lightning_3d.batches.split import is_samples, split_batch
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import BatchError


@dataclass(frozen=True, slots=True)
class Batches:
    """What is trained on.

    Attributes:
        shares: For each batch of the run the batches of the data ranks, in their order.
        microbatches: Into how many micro-batches each of them is cut.
        left_out: Samples that each of them had more, which would have made micro-batches of unequal size.
    """

    shares: list[list[Any]]
    microbatches: int
    left_out: int = 0

    def whole(self) -> list[Any]:
        """Returns the batches of one device: those of all data ranks together.

        Raises:
            BatchError: They cannot be joined.
        """
        return [join(share) for share in self.shares]


def take(module: LightningModule, data: Any, config: StrategyConfig, *, count: int, data_ranks: int) -> Batches:
    """Returns batches of the training loader: the first ones, again from the beginning if it has too few.

    Args:
        module: The user's module; its loader counts without data.
        data: A data module, or loaders as ``trainer.fit`` takes them.
        config: The options of the mesh, which say how a batch is cut.
        count: Batches of the run.
        data_ranks: Data ranks, each of which gets another batch.

    Raises:
        BatchError: There are no batches, or a data rank's samples cannot be cut and joined.
    """
    if data_ranks > 1 and callable(getattr(module, "split_batch", None)):
        raise BatchError(
            f"{type(module).__name__} cuts batches by its own split_batch, and nothing says how to join the batches of "
            f"{data_ranks} data ranks for one device.",
            fix="verify with data_parallel_size=1",
        )
    loader = _loader(module, data)
    given = _cycle(loader)
    first = next(given, None)
    if first is None:
        raise BatchError("the training loader gives no batch.", fix="a loader with at least one batch")
    micro = MicroBatches(module, config)
    cut = len(micro.sizes(first))
    size = extract_batch_size(first) if cut > 1 or data_ranks > 1 else 0
    left_out = size % cut if data_ranks > 1 else 0
    wanted = count * data_ranks
    taken = [first]
    seen = 1
    while len(taken) < wanted:
        batch = next(given)
        # The last batch of an epoch may be smaller.
        if not size or extract_batch_size(batch) == size:
            taken.append(batch)
        seen += 1
        if seen > 10 * wanted:
            raise BatchError("the batches of the training loader have different sizes.", fix="drop_last=True")
    if left_out:
        taken = [split_batch(batch, (size - left_out, left_out))[0] for batch in taken]
    shares = [taken[at : at + data_ranks] for at in range(0, wanted, data_ranks)]
    return Batches(shares, cut, left_out)


def _loader(module: LightningModule, data: Any) -> Any:
    """The training loader, after the hooks that make it."""
    trainer = Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, barebones=False
    )
    module.trainer = trainer
    source = module if data is None else data
    if isinstance(data, LightningDataModule):
        data.trainer = trainer
    if isinstance(source, (LightningDataModule, LightningModule)):
        source.prepare_data()
        source.setup("fit")
        return source.train_dataloader()
    return source


def _cycle(loaders: Any) -> Iterator[Any]:
    combined = CombinedLoader(loaders, "max_size_cycle")
    while True:
        given = False
        for batch, _, _ in iter(combined):
            given = True
            yield batch
        if not given:
            return


def join(batches: Sequence[Any]) -> Any:
    """Returns the batch that holds the samples of some batches of equal size, in their order.

    It undoes `lightning_3d.batches.split.split_batch`: what that cuts is joined, everything else has to be equal.

    Raises:
        BatchError: Something that holds no samples differs.
    """
    if len(batches) == 1:
        return batches[0]
    return _join(batches, int(extract_batch_size(batches[0])), "batch")


def _join(values: Sequence[Any], size: int, place: str) -> Any:
    first = values[0]
    if isinstance(first, Tensor):
        if first.dim() and first.size(0) == size:
            return torch.cat(list(values))
        same = all(torch.equal(first, value) for value in values)
    elif isinstance(first, Mapping):
        items = {key: _join([value[key] for value in values], size, f"{place}[{key!r}]") for key in first}
        kind: Any = type(first)
        return items if kind is dict else kind(items)
    elif isinstance(first, (list, tuple)):
        whole: Any = type(first)
        if is_samples(first, size):
            return whole(item for value in values for item in value)
        parts = [_join(entry, size, f"{place}[{at}]") for at, entry in enumerate(zip(*values, strict=True))]
        return whole(*parts) if hasattr(first, "_fields") else whole(parts)
    elif dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first) if field.init]
        fields = {name: _join([getattr(v, name) for v in values], size, f"{place}.{name}") for name in names}
        return dataclasses.replace(first, **fields)
    else:
        same = all(bool(first == value) for value in values)
    if not same:
        raise BatchError(
            f"{place} is no part of the samples and differs between batches: one device cannot have both.",
            fix="verify with data_parallel_size=1",
        )
    return first
