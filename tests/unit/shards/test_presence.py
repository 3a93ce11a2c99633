from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from lightning_3d.shards.presence import Presence


def presence(rank: int) -> Presence:
    return Presence(
        group=cast(Any, None),
        rank=rank,
        device=torch.device("cpu"),
        holders={"table": (0, 2), "blocks.0.weight": (0,), "blocks.1.weight": (1,), "head": (2,)},
        modules={"blocks.0": 0, "blocks.1": 1, "blocks.10": 2},
        others=2,
    )


@pytest.mark.parametrize(
    ("rank", "absent"),
    [
        (0, {"blocks.1.weight", "head"}),
        (1, {"table", "blocks.0.weight", "head"}),
        (2, {"blocks.0.weight", "blocks.1.weight"}),
    ],
)
def test_what_other_ranks_hold_is_absent(rank: int, absent: set[str]) -> None:
    assert presence(rank).absent == absent


@pytest.mark.parametrize(
    ("name", "rank"),
    [("blocks.0.seen", 0), ("blocks.1.norm.running_mean", 1), ("blocks.10.seen", 2), ("blocks.0", 2), ("count", 2)],
)
def test_buffers_are_right_where_their_module_is_called(name: str, rank: int) -> None:
    assert presence(0).source(name) == rank
