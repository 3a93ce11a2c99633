"""Batches of the data ranks, and the one batch of one device that holds their samples."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d.batches.split import split_batch
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import BatchError
from lightning_3d.verify.batches import join, take

_Pair = namedtuple("_Pair", ("x", "y"))


@dataclass
class _Data:
    x: Tensor
    name: str


class _Module(LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing."""


class _Graphs(_Module):
    def split_batch(self, batch: Any, count: int) -> list[Any]:
        return [batch] * count


def loader(samples: int, batch: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(samples)), batch_size=batch)


@pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: {"x": x, "scale": torch.tensor(2.0), "kind": "words"},
        lambda x: [x, x + 1],
        lambda x: _Pair(x, x * 2),
        lambda x: _Data(x, "name"),
        lambda x: {"names": [str(int(each)) for each in x[:, 0]], "x": x},
    ],
)
def test_joining_undoes_cutting(make: Any) -> None:
    whole = make(torch.arange(12).reshape(6, 2))
    assert repr(join(split_batch(whole, (3, 3)))) == repr(whole)


def test_what_holds_no_samples_has_to_be_equal() -> None:
    batches = [{"x": torch.ones(3), "at": 1}, {"x": torch.ones(3), "at": 2}]
    with pytest.raises(BatchError, match=r"batch\['at'\] is no part of the samples and differs"):
        join(batches)


def test_each_data_rank_gets_a_batch_of_its_own() -> None:
    found = take(_Module(), loader(16, 2), StrategyConfig(num_microbatches=2), count=2, data_ranks=2)
    assert (found.microbatches, found.left_out) == (2, 0)
    assert [[batch[0].tolist() for batch in share] for share in found.shares] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert [batch[0].tolist() for batch in found.whole()] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_samples_that_make_micro_batches_uneven_are_left_out() -> None:
    found = take(_Module(), loader(14, 7), StrategyConfig(num_microbatches=2), count=1, data_ranks=2)
    assert (found.microbatches, found.left_out) == (2, 1)
    assert [batch[0].tolist() for batch in found.shares[0]] == [[*range(6)], [*range(7, 13)]]


def test_a_short_loader_begins_again_and_its_small_last_batch_is_left_out() -> None:
    found = take(_Module(), loader(5, 2), StrategyConfig(), count=2, data_ranks=2)
    assert [[batch[0].tolist() for batch in share] for share in found.shares] == [[[0, 1], [2, 3]]] * 2


def test_an_empty_loader_is_refused() -> None:
    with pytest.raises(BatchError, match="gives no batch"):
        take(_Module(), [], StrategyConfig(), count=1, data_ranks=1)


def test_batches_that_only_the_module_can_cut_are_for_one_data_rank() -> None:
    with pytest.raises(BatchError, match="own split_batch"):
        take(_Graphs(), loader(8, 2), StrategyConfig(), count=1, data_ranks=2)
    assert take(_Graphs(), loader(8, 2), StrategyConfig(num_microbatches=2), count=1, data_ranks=1).microbatches == 2
