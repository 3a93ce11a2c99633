from __future__ import annotations

import pytest

from lightning_3d.config.schema import SCHEDULES
from lightning_3d.parallel.pipeline.placement import ranks_of_stages

ROUND = (0, 1, 2, 3, 0, 1, 2, 3)
MIRRORED = (0, 1, 2, 3, 3, 2, 1, 0)
PLACES = {
    "gpipe": (0, 1, 2, 3),
    "1f1b": (0, 1, 2, 3),
    "loopedbfs": ROUND,
    "interleaved1f1b": ROUND,
    "interleavedzerobubble": ROUND,
    "zbvzerobubble": MIRRORED,
    "dualpipev": MIRRORED,
}


def test_every_schedule_has_a_place() -> None:
    assert set(PLACES) == set(SCHEDULES)


@pytest.mark.parametrize("schedule", PLACES)
def test_places(schedule: str) -> None:
    places = PLACES[schedule]
    assert ranks_of_stages(schedule, 4, len(places) // 4) == places


def test_three_stages_a_rank() -> None:
    assert ranks_of_stages("interleaved1f1b", 2, 3) == (0, 1, 0, 1, 0, 1)
