from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_3d.batches.join import join_outputs

SIZES, SHARES = (2, 1), (0.75, 0.25)


def joined(*outputs: Any) -> Any:
    return join_outputs(outputs, sizes=SIZES, shares=SHARES)


def test_values_are_combined_by_their_shares() -> None:
    assert float(joined(torch.tensor(4.0), torch.tensor(8.0))) == 5.0
    assert joined(4, 8) == 5.0
    assert (
        joined(torch.tensor(2.0, dtype=torch.bfloat16), torch.tensor(6.0, dtype=torch.bfloat16)).dtype == torch.bfloat16
    )
    assert float(joined(torch.tensor(1), torch.tensor(5))) == 2.0


def test_tensors_of_the_micro_batch_are_concatenated() -> None:
    assert joined(torch.tensor([[1], [2]]), torch.tensor([[3]])).tolist() == [[1], [2], [3]]


@pytest.mark.parametrize(
    "outputs",
    [
        (torch.zeros(3), torch.zeros(3)),
        (torch.zeros(2, 4), torch.zeros(1, 5)),
        ("a", "b"),
        ([1, 2], [3]),
        (True, False),
        (None, torch.zeros(1)),
        ({"a": 1}, {"b": 1}),
        ((1, 2), (1,)),
    ],
)
def test_what_does_not_fit_becomes_a_list(outputs: tuple[Any, Any]) -> None:
    found = joined(*outputs)
    assert isinstance(found, list)
    assert all(entry is output for entry, output in zip(found, outputs, strict=True))


class Pair(NamedTuple):
    loss: Tensor
    ids: Tensor


def test_structures_are_joined_entry_by_entry() -> None:
    one = {"loss": torch.tensor(4.0), "pair": Pair(torch.tensor(0.0), torch.arange(2)), "loss_weight": 3, "no": None}
    two = {"loss": torch.tensor(8.0), "pair": Pair(torch.tensor(4.0), torch.arange(1)), "loss_weight": 1, "no": None}
    found = joined(one, two)
    assert float(found["loss"]) == 5.0
    assert found["loss_weight"] == 4
    assert found["no"] is None
    assert type(found["pair"]) is Pair
    assert (float(found["pair"].loss), found["pair"].ids.tolist()) == (1.0, [0, 1, 0])
    assert type(joined((1, 2), (3, 4))) is tuple


def test_one_micro_batch_is_left_alone() -> None:
    output = object()
    assert join_outputs([output], sizes=(3,), shares=(1.0,)) is output
    assert joined(None, None) is None
