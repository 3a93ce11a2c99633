from __future__ import annotations

from typing import Any, cast

import torch

from lightning_3d.parallel.pipeline.plan import PipelinePlan, Stage
from lightning_3d.parallel.pipeline.presence import presence_of


class Group:
    """The place of a process in a group."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def rank(self) -> int:
        return self._rank


def test_a_rank_holds_what_any_of_its_stages_holds() -> None:
    # Two stages on each rank, the second ones in mirrored order.
    stages = tuple(Stage(index=index, rank=(0, 1, 1, 0)[index], first=index, end=index + 1) for index in range(4))
    plan = PipelinePlan(
        schedule="zbvzerobubble",
        ranks=2,
        blocks=tuple(f"blocks.{index}" for index in range(4)),
        stages=stages,
        holders={"table": (0, 3), "blocks.1.w": (1,), "blocks.2.w": (2,), "scale": (2, 3)},
        modules={"table": (0, 3), "blocks.1": (1,), "blocks.3": (3,)},
        boundaries=((), (), (), ()),
    )
    found = presence_of(plan, cast(Any, Group(1)), torch.device("cpu"))
    assert found.rank == 1
    assert found.absent == {"table"}
    assert presence_of(plan, cast(Any, Group(0)), torch.device("cpu")).absent == {"blocks.1.w", "blocks.2.w"}
    assert [found.source(f"{name}.buffer") for name in ("table", "blocks.1", "blocks.3", "elsewhere")] == [0, 1, 0, 0]
