from __future__ import annotations

from collections import Counter

import pytest

from lightning_3d.config.schema import ONE_STAGE_SCHEDULES, SCHEDULES
from lightning_3d.parallel.pipeline.placement import ranks_of_stages
from lightning_3d.parallel.pipeline.schedule.actions import (
    SPLIT_SCHEDULES,
    Action,
    rank_actions,
    runnable_microbatches,
)


def _per_rank(schedule: str) -> int:
    return 1 if schedule in ONE_STAGE_SCHEDULES else 2


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_microbatch_goes_through_each_stage_once(schedule: str, ranks: int) -> None:
    placed = ranks_of_stages(schedule, ranks, _per_rank(schedule))
    for asked in range(1, 10):
        count = runnable_microbatches(schedule, ranks=ranks, microbatches=asked)
        rows = rank_actions(schedule, ranks=ranks, microbatches=count, stages_per_rank=_per_rank(schedule))
        done = Counter((rank, action) for rank, row in enumerate(rows) for action in row)
        assert set(done.values()) == {1}
        for stage, rank in enumerate(placed):
            for index in range(count):
                halves = {"I", "W"} if (rank, Action(stage, "I", index)) in done else {"B"}
                kinds = {action.kind for where, action in done if (where, action.stage) == (rank, stage)}
                assert kinds <= {"F", "B", "I", "W"}
                for kind in ("F", *halves):
                    assert (rank, Action(stage, kind, index)) in done, f"{stage}{kind}{index} is missing on {rank}"
        # Whole backwards and pairs of halves alike are one backward.
        backwards = sum(action.kind in "BI" for _, action in done)
        assert backwards == sum(action.kind == "F" for _, action in done) == len(placed) * count


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_number_of_microbatches_is_the_least_that_torch_takes(schedule: str, ranks: int) -> None:
    for asked in range(1, 14):
        count = runnable_microbatches(schedule, ranks=ranks, microbatches=asked)
        assert count >= asked
        for fewer in range(asked, count):
            # 1F1B's own order is written here, and torch refuses only when it is made for a stage.
            if schedule == "1f1b":
                assert fewer < ranks
                continue
            with pytest.raises(ValueError, match="microbatches"):
                rank_actions(schedule, ranks=ranks, microbatches=fewer, stages_per_rank=_per_rank(schedule))


@pytest.mark.parametrize(
    ("schedule", "ranks", "asked", "count"),
    [
        ("gpipe", 4, 1, 1),
        ("1f1b", 4, 1, 4),
        ("1f1b", 4, 6, 6),
        ("loopedbfs", 4, 3, 3),
        ("interleaved1f1b", 2, 5, 6),
        ("interleaved1f1b", 4, 3, 3),
        ("interleavedzerobubble", 4, 9, 10),
        ("zbvzerobubble", 4, 1, 1),
        ("dualpipev", 2, 3, 4),
    ],
)
def test_runnable_microbatches(schedule: str, ranks: int, asked: int, count: int) -> None:
    assert runnable_microbatches(schedule, ranks=ranks, microbatches=asked) == count


def test_one_forward_one_backward_keeps_as_many_as_there_are_stages_ahead() -> None:
    rows = rank_actions("1f1b", ranks=2, microbatches=3)
    assert [[str(action) for action in row] for row in rows] == [
        ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
        ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"],
    ]


def test_only_some_schedules_split_backwards() -> None:
    for schedule in SCHEDULES:
        rows = rank_actions(schedule, ranks=2, microbatches=4, stages_per_rank=_per_rank(schedule))
        splits = any(action.kind == "W" for row in rows for action in row)
        assert splits == (schedule in SPLIT_SCHEDULES)
