"""Whether what the ranks of a mesh have seen is what one device has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.features.here import Mine

# Below this, a difference is rounding.
_NOTHING = 1e-12


def assert_alike(ranks: Sequence[Mapping[str, Any]], expected: Mapping[str, Any], *, data: int, close: float) -> None:
    """Compares every rank with one device.

    Args:
        ranks: What each rank has seen, in rank order with the data axis outermost.
        expected: What one device has seen.
        data: Data ranks.
        close: Largest relative difference of numbers.

    Raises:
        AssertionError: Names the rank, the place and the two values.
    """
    per_data_rank = len(ranks) // data
    for rank, seen in enumerate(ranks):
        assert list(seen) == list(expected), f"rank {rank} has seen {list(seen)}, one device {list(expected)}"
        for name, value in expected.items():
            found = seen[name]
            if isinstance(value, Mine):
                mates = [ranks[at][name].values for at in range(rank % per_data_rank, len(ranks), per_data_rank)]
                value, found = list(value.values), _dealt(mates)
            _same(found, value, f"rank {rank}, {name}", close)


def _dealt(hands: Sequence[Sequence[Any]]) -> list[Any]:
    """Batch by batch, the parts of all data ranks as one."""
    rounds = [[hand[at] for hand in hands if at < len(hand)] for at in range(max(map(len, hands)))]
    return [torch.cat(parts) if isinstance(parts[0], Tensor) else list(chain(*parts)) for parts in rounds]


def _same(found: Any, expected: Any, place: str, close: float) -> None:
    if isinstance(expected, Tensor):
        assert type(found) is type(expected), f"{place}: {type(found)}"
        assert found.shape == expected.shape, f"{place}: shape {found.shape}, one device {expected.shape}"
        assert found.dtype == expected.dtype, f"{place}: {found.dtype}, one device {expected.dtype}"
        largest = float(expected.double().abs().max()) if expected.numel() else 0.0
        torch.testing.assert_close(
            found.double(),
            expected.double(),
            rtol=0,
            atol=max(close * largest, _NOTHING),
            msg=lambda m: f"{place}: {m}",
        )
    elif isinstance(expected, Mapping):
        assert list(found) == list(expected), f"{place}: {list(found)}, one device {list(expected)}"
        for key, value in expected.items():
            _same(found[key], value, f"{place}[{key!r}]", close)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), f"{place}: {found}, one device {expected}"
        for index, (mine, value) in enumerate(zip(found, expected, strict=True)):
            _same(mine, value, f"{place}[{index}]", close)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=close, abs=_NOTHING, nan_ok=True), f"{place}: {found}, {expected}"
    else:
        assert found == expected, f"{place}: {found!r}, one device {expected!r}"
