"""Torch's schedules with our stages, on plain nets: outputs and gradients are those of one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from lightning_3d.config.schema import ONE_STAGE_SCHEDULES, SCHEDULES
from lightning_3d.counters import CollectiveCounter
from lightning_3d.parallel.pipeline.cost import pipeline_traffic
from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.parallel.pipeline.schedule.actions import rank_actions
from lightning_3d.parallel.pipeline.schedule.simulate import simulate
from tests.marks import more
from tests.spmd.pipeline_nets import Net, Pipeline, batch_of, ideal_bubble
from tests.spmd.pipeline_odd_nets import Skips, Slow, SometimesSkips
from tests.spmd.pool import run_spmd

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]


def counts(rank: int, world: int, schedule: str) -> None:
    pipeline = Pipeline(schedule)
    for count in range(1, 10):
        pipeline.train(batch_of(*[3] * count))
    assert pipeline.runs.recorded == [(2, 3, 6)], "one kind of input is recorded once"


@pytest.mark.parametrize("ranks", [more(2), 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_microbatches(schedule: str, ranks: int) -> None:
    run_spmd(counts, ranks, schedule)


def three_stages(rank: int, world: int) -> None:
    for schedule in ("loopedbfs", "interleaved1f1b", "interleavedzerobubble"):
        pipeline = Pipeline(schedule, stages_per_rank=3)
        for count in (1, 4, 5):
            pipeline.train(batch_of(*[3] * count))
            pipeline.evaluate(batch_of(*[3] * count))


def test_three_stages_on_a_rank() -> None:
    run_spmd(three_stages, 2)


def shapes(rank: int, world: int) -> None:
    for schedule in SCHEDULES:
        pipeline = Pipeline(schedule, Skips)
        for length in (3, 5, 4, 3, 1, 2, 3):
            pipeline.train(batch_of(*[length] * 4))
        assert [shape[1] for shape in pipeline.runs.recorded] == [3, 5, 4, 1, 2]
        assert len(pipeline.engine._schedules) == 4


def test_lengths_change_from_step_to_step() -> None:
    run_spmd(shapes, 2)


def mixed(rank: int, world: int) -> None:
    for schedule in SCHEDULES:
        for make in (Net, Skips, SometimesSkips) if world == 2 else (SometimesSkips,):
            pipeline = Pipeline(schedule, make)
            # Fewer than 1F1B and DualPipeV need, an odd number for the interleaved ones, and enough.
            for lengths in ((5,), (3, 5, 4), (1, 4, 4, 2, 6), (4, 4, 4, 4)):
                pipeline.train(batch_of(*lengths))
            pipeline.evaluate(batch_of(2, 5, 4))


@pytest.mark.parametrize("ranks", [2, more(4)])
def test_microbatches_of_a_step_differ(ranks: int) -> None:
    run_spmd(mixed, ranks, timeout=120)


def evaluations(rank: int, world: int) -> None:
    for schedule in SCHEDULES:
        pipeline = Pipeline(schedule, Skips)
        for count in (1, 3, 4, 5):
            pipeline.train(batch_of(*[3] * count))
            pipeline.evaluate(batch_of(*[3] * count))
            with torch.no_grad():
                pipeline.evaluate(batch_of(*[3] * count))
            with torch.inference_mode():
                pipeline.evaluate(batch_of(*[3] * count))
            pipeline.compare_gradients()
        pipeline.evaluate(batch_of(3, 3, 3, 3))


@pytest.mark.parametrize("ranks", [2, more(4)])
def test_evaluations_between_trainings(ranks: int) -> None:
    run_spmd(evaluations, ranks, timeout=120)


def weights(rank: int, world: int) -> None:
    for schedule in SCHEDULES:
        Pipeline(schedule).train(batch_of(3, 3, 3, 2, 3), [0.1, 0.4, 0.0, 0.3, 0.2])


def test_losses_have_weights() -> None:
    run_spmd(weights, 2)


class Halves(Net):
    """Its loss has the dtype of its parameters, and the gradients of its weights are exact in halves."""

    def output(self, sent: tuple[torch.Tensor, ...], x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (sent[0] * x).sum(), "prediction": sent[0]}


def dtypes(rank: int, world: int) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for schedule in ("1f1b", "zbvzerobubble"):
            pipeline = Pipeline(schedule, Halves, dtype=dtype)
            # One after the other on the process that is compared too, so sums round alike.
            for batch in batch_of(3, 3, dtype=dtype):
                pipeline.train([batch], [4.0])


def test_losses_of_any_dtype() -> None:
    run_spmd(dtypes, 2)


def checked(rank: int, world: int) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        for schedule in SCHEDULES:
            pipeline = Pipeline(schedule, Skips)
            pipeline.train(batch_of(3, 3, 3))
            pipeline.train(batch_of(3, 4, 3))
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_what_is_sent_is_what_was_announced() -> None:
    run_spmd(checked, 2)


def timelines(rank: int, world: int) -> None:
    for schedule in SCHEDULES:
        pipeline = Pipeline(schedule)
        pipeline.engine.start_timeline()
        pipeline.train(batch_of(3, 3, 3, 3))
        timeline = pipeline.engine.stop_timeline()
        per_rank = len(pipeline.own)
        order = rank_actions(schedule, ranks=world, microbatches=4, stages_per_rank=per_rank)
        found = [tuple(event.action for event in timeline.of_rank(rank)) for rank in range(world)]
        assert found == list(order)
        assert 0 < timeline.bubble < 1
        # A stage begins when the one before has ended, also by the clocks of two ranks.
        ended = {event.action: event.end for event in timeline.events}
        forwards = [event for event in timeline.events if event.action.kind == "F" and event.action.stage]
        assert all(event.start > ended[replace(event.action, stage=event.action.stage - 1)] for event in forwards)
        pipeline.engine.start_timeline()
        pipeline.evaluate(batch_of(3, 3))
        assert len(pipeline.engine.stop_timeline().events) == 2 * len(pipeline.plan.stages)


def test_timelines_are_measured() -> None:
    run_spmd(timelines, 2)


def sixteen(rank: int, world: int) -> None:
    pipeline = Pipeline("gpipe")
    pipeline.engine.start_timeline()
    pipeline.train(batch_of(3, 3, 3, 3, samples=4))
    timeline = pipeline.engine.stop_timeline()
    simulated = simulate("gpipe", ranks=world, microbatches=4)
    assert [event.action for event in timeline.events] == [event.action for event in simulated.events]
    assert simulated.bubble == pytest.approx(3 / 7)
    assert timeline.in_flight(0) == simulated.in_flight(0) == 4


def test_sixteen_samples_in_four_microbatches_on_four_stages() -> None:
    run_spmd(sixteen, 4)


def bubbles(rank: int, world: int) -> None:
    for schedule in ONE_STAGE_SCHEDULES:
        for count in (2, 4, 8):
            pipeline = Pipeline(schedule, Slow)
            batch = batch_of(*[3] * count)
            distances = []
            # The first step makes buffers and connections, and others of the machine may get in between a later one.
            while len(distances) < 10 and min(distances, default=1.0) >= 0.03:
                pipeline.engine.start_timeline()
                pipeline.engine.train(batch.__getitem__, lambda _, output: output["loss"], ["kind"] * count)
                timeline = pipeline.engine.stop_timeline()
                distances.append(abs(timeline.bubble - ideal_bubble(world, count)))
            assert min(distances) < 0.03, f"{schedule}, {count}:\n{timeline}"
            worst = count if schedule == "gpipe" else min(world, count)
            assert max(timeline.in_flight(rank) for rank in range(world)) == worst


def test_measured_bubbles_are_those_of_the_formula() -> None:
    run_spmd(bubbles, 2)


def traffic(rank: int, world: int) -> None:
    for schedule in SCHEDULES:
        pipeline = Pipeline(schedule, Skips)
        batch = batch_of(3, 3, 3)
        pipeline.train(batch)
        record = pipeline.runs.record(lambda batch=batch: batch[0])
        fields = {name: getattr(pipeline.plan, name) for name in pipeline.plan.__slots__}
        plan = PipelinePlan(**fields | {"boundaries": record.boundaries})
        with CollectiveCounter({"pipeline_parallel": pipeline.group}) as counter:
            pipeline.train(batch)
        expected = pipeline_traffic(plan, rank=rank, microbatches=3)
        assert [str(row) for row in counter.table.rows if row.operation == "send"] == [
            str(row) for row in expected.rows
        ]


def test_a_step_sends_what_was_predicted() -> None:
    run_spmd(traffic, 2)
