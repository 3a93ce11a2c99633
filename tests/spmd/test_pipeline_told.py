"""What a pipeline tells of itself: the plan before training, one step of it in time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_3d import ModuleError
from lightning_3d.callbacks import PipelineTimeline
from tests.spmd.pipeline_watched import TWO, Watched, samples
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import Ranks

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(120)]


def told(rank: int, world: int, folder: str) -> str:
    ranks = Ranks(world=world, strategy={**TWO, "num_microbatches": 2})
    trainer = ranks.trainer(PipelineTimeline(at_batch=1, dirpath=f"{folder}/of_{rank}"), accumulate_grad_batches=2)
    trainer.fit(Watched(), samples(16), samples(4))
    strategy: Any = trainer.strategy
    strategy.start_pipeline_timeline()
    assert strategy.stop_pipeline_timeline().measured.events == ()
    text: str = strategy.explain()
    return text


def test_the_plan_and_one_step_are_shown(tmp_path: Path) -> None:
    first, second = run_spmd(told, 2, str(tmp_path), timeout=60)
    assert first == second
    for words in (
        "pipeline   2 ranks, 1f1b",
        "stage  rank  layers    cost     receives  blocks",
        "what each pipeline rank holds",
        "stage 0 -> stage 1: rank 0 -> rank 1, ",
        "1f1b, micro-batches 2, by counted cost: bubble ",
        "  rank 1  ...",
    ):
        assert words in first
    # Two micro-batches of two samples in each of two accumulated batches.
    sent = re.search(r"rank 0 -> rank 1, (\d+) B forward", first)
    assert sent is not None
    assert f"sends {4 * int(sent[1])} B, keeps {2 * int(sent[1])} B to receive in" in first
    # Ranks with nothing to say write nothing.
    assert [path.name for path in tmp_path.iterdir()] == ["of_0"]
    rows = (tmp_path / "of_0" / "timeline.txt").read_text().splitlines()
    assert [row.split(" ")[0] for row in rows] == ["measured,", "rank", "rank", "theoretical:", "rank", "rank"]
    assert "micro-batches in flight 2 1" in rows[0]


def without(rank: int, world: int) -> None:
    trainer = Ranks(world=world).trainer(limit_train_batches=1, limit_val_batches=0)
    trainer.fit(BoringModel())
    strategy: Any = trainer.strategy
    with pytest.raises(ModuleError, match="there is no pipeline to take the time of"):
        strategy.start_pipeline_timeline()


def test_without_a_pipeline_there_is_no_timeline() -> None:
    run_spmd(without, 1, timeout=60)
