"""Features of loaders: streams, several at once; and what predictions look like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from tests.features.here import CUBE, Here
from tests.features.modules import Module, Samples, metrics, weights
from tests.features.samplers import BySize
from tests.features.seeing import Sees, all_batches, dealt, fit, joined, numbers, of_data_ranks
from tests.features.table import Feature, Seen

# ---- streams ----


class Stream(IterableDataset[Any]):
    """Samples that come one after the other; each data rank takes its own, as the strategy says which it is.

    Args:
        trainer: The Trainer; with plain Lightning on one device there is nothing to share out.
        counts: Samples of each data rank; one number if they are to be even.
    """

    def __init__(self, trainer: Trainer, *counts: int) -> None:
        strategy: Any = trainer.strategy
        size, rank = getattr(strategy, "data_size", 1), getattr(strategy, "data_rank", 0)
        if len(counts) == 1:
            chosen = list(range(counts[0]))[rank::size]
        else:
            # Of each batch of 8, the first rank has the even numbers.
            hands = [list(range(hand, 2 * count, 2)) for hand, count in enumerate(counts)]
            chosen = sorted(chain(*hands)) if size == 1 else hands[rank]
        self.samples, self.chosen = Samples(64), chosen

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[index] for index in self.chosen)


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.chosen)


class Streams(L.LightningDataModule):
    """Loaders of streams.

    Args:
        here: Where it runs.
        kind: Their class.
        train: Samples to train on, of each data rank.
        validate: Samples to validate on.
    """

    def __init__(self, here: Here, kind: type[Stream], train: tuple[int, ...], validate: tuple[int, ...]) -> None:
        super().__init__()
        self.here, self.kind, self.train, self.validate = here, kind, train, validate

    def _loader(self, counts: tuple[int, ...]) -> Any:
        assert self.trainer is not None
        stream = self.kind(self.trainer, *counts)
        return DataLoader(stream, batch_size=8 // self.here.mesh.data)

    def train_dataloader(self) -> Any:
        return self._loader(self.train)

    def val_dataloader(self) -> Any:
        return self._loader(self.validate)


def _streamed(here: Here, data: Streams, **options: Any) -> Seen:
    seen = fit(here, data, **options)
    batches = {stage: [sorted(batch) for batch in found] for stage, found in seen["batches"].items()}
    return {**seen, "batches": batches}


def streams(here: Here) -> Seen:
    return {
        kind.__name__: _streamed(here, Streams(here, kind, (24,), (20,)), val_check_interval=2)
        for kind in (Stream, SizedStream)
    }


def uneven_streams(here: Here) -> Seen:
    """Training ends with the shorter stream; evaluation with the longer one."""
    train = (20, 12) if here.mesh.data > 1 else (12, 12)
    found = {}
    for kind in (Stream, SizedStream):
        seen = _streamed(here, Streams(here, kind, train, (14, 9)), val_check_interval=2)
        evaluated = sorted(chain(*seen["batches"].pop("validate")))
        found[kind.__name__] = {**seen, "evaluated": evaluated}
    return found


# ---- several loaders ----


class Several(Module):
    """Takes the batches of all loaders as one."""

    def loss(self, batch: Any) -> Tensor:
        pairs = [each for each in tree_leaves(batch, is_leaf=_is_pair) if each is not None]
        return super().loss([torch.cat(each) for each in zip(*pairs, strict=True)])


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, (list, tuple)) and isinstance(batch[0], Tensor)


class EachLoader(Module):
    """Logs each validation loader under its own name, and all of them under one."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        inputs, targets = batch
        each = F.cross_entropy(self(inputs), targets, reduction="none")
        self.log("val_loss", each.mean(), sync_dist=True)
        self.log("worst", each.max(), reduce_fx="max", sync_dist=True)
        self.log(f"loss_of_{dataloader_idx}", each.mean(), add_dataloader_idx=False, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return super().predict_step(batch, batch_idx) + 10 * dataloader_idx


def _both(here: Here) -> dict[str, Any]:
    options = {"shuffle": True}
    return {"a": here.loader(Samples(24), 8, **options), "b": here.loader(Samples(16, seed=1), 8, **options)}


def _fit_several(here: Here, train: Any) -> Seen:
    L.seed_everything(5, verbose=False)
    sees = Sees()
    trainer = here.trainer(sees, max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(Several(), train)
    parts = [tree_leaves(batch, is_leaf=_is_numbers) for epoch in sees.epochs["train"] for batch in epoch]
    return {
        # Those of each loader by itself; one that has ended gives none.
        "batches": [joined(here, [part[loader] or [] for part in parts]) for loader in range(len(parts[0]))],
        "metrics": metrics(trainer),
        "weights": weights(trainer),
    }


def _is_numbers(each: Any) -> bool:
    return isinstance(each, list) and isinstance(each[0], int)


def several_train_loaders(here: Here) -> Seen:
    both = _both(here)
    return {
        "dict": _fit_several(here, both),
        "list": _fit_several(here, list(both.values())),
        "nested": _fit_several(here, {"one": both["a"], "more": [both["b"], both["a"]]}),
    }


_MODES: tuple[Any, ...] = ("min_size", "max_size_cycle", "max_size")


def combined_loaders(here: Here) -> Seen:
    return {mode: _fit_several(here, CombinedLoader(_both(here), mode)) for mode in _MODES}


def combined_loaders_in_evaluation(here: Here) -> Seen:
    found = {}
    for mode in (*_MODES, "sequential"):
        L.seed_everything(5, verbose=False)
        module = EachLoader() if mode == "sequential" else Several()
        found[mode] = here.trainer().validate(module, CombinedLoader(_both(here), mode), verbose=False)
    return found


def several_validation_loaders(here: Here) -> Seen:
    L.seed_everything(5, verbose=False)
    sees, module = Sees(), EachLoader()
    loaders = [here.loader(Samples(count, seed=count), 4) for count in (16, 10, 5)]
    trainer = here.trainer(sees, limit_val_batches=3)
    trainer.fit(module, here.loader(Samples(16), 8), loaders)
    return {
        "fitted": metrics(trainer),
        "tested": trainer.test(module, loaders, verbose=False),
        "batches": all_batches(here, sees),
    }


# ---- predictions ----


class Writes(BasePredictionWriter):
    """Keeps predictions under the numbers of their samples."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.of_sample: dict[int, int] = {}
        self.in_order: list[list[int]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert list(batch_indices) == numbers(batch)
        self.of_sample |= dict(zip(batch_indices, prediction.tolist(), strict=True))

    def write_on_epoch_end(self, trainer: Trainer, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.in_order += [list(indices) for loader in batch_indices for indices in loader]


def _predicted(here: Here, loader: Any, together: Callable[..., list[Any]] = joined) -> Seen:
    L.seed_everything(5, verbose=False)
    writes, module = Writes(), Module()
    trainer = here.trainer(writes)
    returned: Any = trainer.predict(module, loader)
    assert returned is not None
    # Files are written once, by the first rank of each model group.
    every = of_data_ranks(here, writes.of_sample, first=True)
    return {
        "returned": together(here, [part.tolist() for part in returned]),
        "in order": together(here, writes.in_order, first=True),
        "of samples": dict(sorted(item for hand in every for item in hand.items())),
        "nothing": trainer.predict(module, loader, return_predictions=False),
    }


def predictions(here: Here) -> Seen:
    return {
        "even": _predicted(here, here.loader(Samples(24), 8)),
        "with a short batch": _predicted(here, here.loader(Samples(21), 8)),
        "by a sampler": _predicted(here, here.loader(Samples(32), 8, sampler=list(range(30, 2, -2)))),
        "by a batch sampler": _predicted(
            here, DataLoader(Samples(20), batch_sampler=BySize(range(18), 4, drop_last=False)), dealt
        ),
    }


def predictions_of_several(here: Here) -> Seen:
    L.seed_everything(5, verbose=False)
    returned: Any = here.trainer().predict(EachLoader(), [here.loader(Samples(count), 4) for count in (10, 5)])
    return {"returned": [joined(here, [part.tolist() for part in loader]) for loader in returned]}


FEATURES: tuple[Feature, ...] = (
    Feature(name="IterableDataset", program=streams),
    Feature(name="IterableDataset, uneven ends", program=uneven_streams, always=(CUBE,)),
    Feature(name="several training loaders", program=several_train_loaders),
    Feature(name="CombinedLoader in training", program=combined_loaders),
    Feature(name="CombinedLoader in evaluation", program=combined_loaders_in_evaluation),
    Feature(name="several validation loaders", program=several_validation_loaders),
    Feature(name="predictions and their order", program=predictions),
    Feature(name="predictions of several loaders", program=predictions_of_several),
)
