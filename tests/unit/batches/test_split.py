from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_3d.batches.split import slice_sizes, split_batch, split_by_module
from lightning_3d.errors import BatchError


@pytest.mark.parametrize(
    ("size", "count", "sizes"),
    [(7, 4, (2, 2, 2, 1)), (8, 4, (2, 2, 2, 2)), (3, 4, (1, 1, 1)), (5, 1, (5,)), (9, 2, (5, 4)), (0, 3, (0,))],
)
def test_sizes_are_even_and_larger_ones_come_first(size: int, count: int, sizes: tuple[int, ...]) -> None:
    assert slice_sizes(size, count) == sizes


def test_tensors_of_the_batch_are_cut_and_others_go_whole() -> None:
    batch = {"x": torch.arange(10).view(5, 2), "scale": torch.tensor(3.0), "table": torch.ones(4, 5), "name": "all"}
    first, second = split_batch(batch, (3, 2))
    assert torch.equal(first["x"], batch["x"][:3])
    assert torch.equal(second["x"], batch["x"][3:])
    assert all(part[key] is batch[key] for part in (first, second) for key in ("scale", "table", "name"))


class Pair(NamedTuple):
    inputs: Tensor
    targets: Tensor


@dataclass
class Item:
    inputs: Tensor
    names: list[str]
    pair: Pair
    epoch: int = 0


def test_containers_keep_their_type() -> None:
    pair = Pair(torch.arange(4), torch.arange(4) * 10)
    batch = OrderedDict(item=Item(torch.ones(4, 2), list("abcd"), pair, 7), both=[pair.inputs, (pair.targets,)])
    for index, part in enumerate(split_batch(batch, (2, 2))):
        assert type(part) is OrderedDict
        item = part["item"]
        assert isinstance(item, Item)
        assert (item.epoch, item.names) == (7, [list("ab"), list("cd")][index])
        assert item.inputs.shape == (2, 2)
        assert type(item.pair) is Pair
        assert item.pair.targets.tolist() == [[0, 10], [20, 30]][index]
        assert part["both"][0].tolist() == item.pair.inputs.tolist()
        assert type(part["both"][1]) is tuple


def test_lists_of_samples_are_cut() -> None:
    batch = ["a", "b", "c"], [{"i": 0}, {"i": 1}, {"i": 2}], [torch.zeros(n) for n in (4, 5, 6)], torch.arange(3)
    first, second = split_batch(batch, (2, 1))
    assert first[0] == ["a", "b"]
    assert second[1] == [{"i": 2}]
    assert [len(tensor) for tensor in first[2]] == [4, 5]
    assert second[3].tolist() == [2]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_pair_of_tensors_in_a_batch_of_two_is_no_list_of_samples(kind: Any) -> None:
    pair = kind([torch.tensor([[1.0], [2.0]]), torch.tensor([3, 4])])
    first, second = split_batch(pair, (1, 1))
    assert type(first) is kind
    assert (first[0].tolist(), first[1].tolist()) == ([[1.0]], [3])
    assert (second[0].tolist(), second[1].tolist()) == ([[2.0]], [4])


def test_a_pair_of_inputs_and_targets_of_other_kinds_in_a_batch_of_two() -> None:
    (inputs, names), (more, other) = split_batch((torch.tensor([1, 2]), ["a", "b"]), (1, 1))
    assert (inputs.tolist(), names, more.tolist(), other) == ([1], ["a"], [2], ["b"])
    (only, whole), _ = split_batch([torch.tensor([1, 2]), 5], (1, 1))
    assert (only.tolist(), whole) == ([1], 5)
    (nested, target), _ = split_batch(({"x": torch.tensor([1, 2])}, torch.tensor([3, 4])), (1, 1))
    assert (nested["x"].tolist(), target.tolist()) == ([1], [3])


def test_two_strings_or_mappings_in_a_batch_of_two_are_samples() -> None:
    assert split_batch({"names": ["a", "b"], "x": torch.zeros(2)}, (1, 1))[1]["names"] == ["b"]
    assert split_batch({"boxes": [{"n": torch.zeros(3)}, {"n": torch.zeros(4)}]}, (1, 1))[1]["boxes"][0]["n"].shape == (
        4,
    )


def test_batch_of_transformers_stays_one() -> None:
    from transformers import BatchEncoding

    batch = BatchEncoding({"input_ids": torch.arange(6).view(3, 2), "labels": torch.arange(3)})
    first, second = split_batch(batch, (2, 1))
    assert type(first) is BatchEncoding
    assert first.input_ids.tolist() == [[0, 1], [2, 3]]
    assert second["labels"].tolist() == [2]


def test_other_mappings_keep_their_type() -> None:
    parts = split_batch(UserDict(x=torch.arange(2)), (1, 1))
    assert isinstance(parts[0], UserDict)
    assert parts[1]["x"].tolist() == [1]


def test_parts_together_are_the_batch() -> None:
    batch = torch.randn(7, 3)
    assert torch.equal(torch.cat(split_batch(batch, slice_sizes(7, 3))), batch)


def test_modules_own_way() -> None:
    assert split_by_module(lambda batch, count: [batch] * count, "b", 3) == ["b", "b", "b"]
    assert split_by_module(lambda batch, count: tuple(batch), [1, 2], 2) == [1, 2]
    with pytest.raises(BatchError, match=r"split_batch\(batch, 3\) returned 2 parts"):
        split_by_module(lambda batch, count: [1, 2], None, 3)
    with pytest.raises(BatchError, match="returned Tensor"):
        split_by_module(lambda batch, count: torch.zeros(3), None, 3)
