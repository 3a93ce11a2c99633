from __future__ import annotations

import pytest
import torch

from lightning_3d.batches.weights import WeightedWindow, loss_of, shares, weight_of
from lightning_3d.errors import BatchError

CPU = torch.device("cpu")


def test_loss_and_weight_of_an_output() -> None:
    loss = torch.tensor(1.0)
    assert loss_of(loss) is loss_of({"loss": loss}) is loss
    assert loss_of(None) is loss_of({"other": loss}) is loss_of({"loss": 3.0}) is None
    assert weight_of(loss) is weight_of({"loss": loss}) is weight_of(None) is None
    assert weight_of({"loss_weight": torch.tensor([5])}) == weight_of({"loss_weight": 5}) == 5.0


@pytest.mark.parametrize("value", [torch.ones(2), -1, float("nan")])
def test_weights_that_are_none(value: object) -> None:
    with pytest.raises(BatchError, match="loss_weight"):
        weight_of({"loss_weight": value})


def test_shares_add_up() -> None:
    assert shares((2, 1, 1)) == [0.5, 0.25, 0.25]
    assert shares((0, 0)) == [0.5, 0.5]


def test_a_window_divides_once_and_opens_the_next() -> None:
    window = WeightedWindow()
    for weight in (3.0, 0.0, 5.0):
        window.add(weight)
    assert window.gradient_factor(None, CPU) == torch.tensor(1 / 8)
    window.add(None)
    assert window.gradient_factor(None, CPU) is None
    window.add(2.0)
    assert window.gradient_factor(None, CPU) == torch.tensor(0.5)


@pytest.mark.parametrize("weights", [(1.0, None), (None, 1.0)])
def test_weights_for_some_only_are_an_error(weights: tuple[float | None, ...]) -> None:
    window = WeightedWindow()
    window.add(weights[0])
    with pytest.raises(BatchError, match="some did not"):
        window.add(weights[1])


def test_weights_that_are_all_zero_are_an_error() -> None:
    window = WeightedWindow()
    window.add(0.0)
    with pytest.raises(BatchError, match="is 0 for every"):
        window.gradient_factor(None, CPU)
