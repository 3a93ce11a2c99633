"""Small nets in stages, what stands in their runs for the user's step, and the same steps on one process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten

from lightning_3d.config.schema import ONE_STAGE_SCHEDULES
from lightning_3d.parallel.pipeline.engine import PipelineEngine
from lightning_3d.parallel.pipeline.placement import ranks_of_stages
from lightning_3d.parallel.pipeline.plan import PipelinePlan, Stage
from lightning_3d.parallel.pipeline.record.step import Origin, StepRecord, Value
from lightning_3d.parallel.pipeline.stage_module import StageModule

WIDTH = 6
CPU = torch.device("cpu")


class Net(nn.Module):
    """Stages of one block each; what one returns the next receives, and the last returns losses.

    Attributes:
        zeros_for_none: A stage gets a gradient of zeros where on one process none would come to it.
    """

    zeros_for_none = False

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList(self.block(index, stages) for index in range(stages))

    def block(self, index: int, stages: int) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def run(self, stage: int, received: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        """Returns what a stage sends."""
        (h,) = received or (x,)
        return (h + self.stages[stage](h),)

    def output(self, sent: tuple[Tensor, ...], x: Tensor) -> dict[str, Tensor]:
        """Returns the output of the step."""
        h = sent[0]
        return {"loss": ((h - x) ** 2).mean(), "prediction": h}


@dataclass(frozen=True)
class Runs:
    """Runs a net's stages in place of the user's step, which only gives the micro-batch."""

    net: Net
    recorded: list[tuple[int, ...]]

    def record(self, step: Callable[[], Tensor]) -> StepRecord:
        x = step()
        self.recorded.append(tuple(x.shape))
        received: tuple[Tensor, ...] = ()
        boundaries: list[tuple[Value, ...]] = []
        with torch.enable_grad():
            for stage in range(len(self.net.stages)):
                boundaries.append(tuple(_value(index, value) for index, value in enumerate(received)))
                received = self.net.run(stage, received, x)
        blocks = tuple(f"stages.{stage}" for stage in range(len(self.net.stages)))
        return StepRecord(blocks=blocks, calls=(), boundaries=tuple(boundaries), parameters={}, modules={})

    def run_stage(
        self, stage: int, received: tuple[Tensor, ...], record: StepRecord, step: Callable[[], Tensor]
    ) -> Any:
        x = step()
        # As a real run does, so that nothing keeps what torch receives in.
        sent = self.net.run(stage, tuple(value.clone() for value in received), x)
        return self.net.output(sent, x) if stage + 1 == len(self.net.stages) else sent


def _value(index: int, value: Tensor) -> Value:
    origin = Origin(kind="module", maker="stage", output=index)
    return Value(origin=origin, shape=tuple(value.shape), dtype=value.dtype, requires_grad=value.requires_grad)


def plan_of(schedule: str, ranks: int, stages_per_rank: int | None = None) -> PipelinePlan:
    """A plan of one block for each stage."""
    per_rank = stages_per_rank or (1 if schedule in ONE_STAGE_SCHEDULES else 2)
    placed = ranks_of_stages(schedule, ranks, per_rank)
    stages = tuple(Stage(index=index, rank=rank, first=index, end=index + 1) for index, rank in enumerate(placed))
    blocks = tuple(f"stages.{stage}" for stage in range(len(placed)))
    return PipelinePlan(
        schedule=schedule, ranks=ranks, blocks=blocks, stages=stages, holders={}, modules={}, boundaries=()
    )


class Pipeline:
    """A net on this rank's stages, beside the whole of it."""

    def __init__(
        self,
        schedule: str,
        make: Callable[[int], Net] = Net,
        *,
        dtype: torch.dtype = torch.float64,
        whole_backward: bool = False,
        lazy_units: bool = False,
        stages_per_rank: int | None = None,
    ) -> None:
        self.group = dist.distributed_c10d._get_default_group()
        self.rank = dist.get_rank()
        self.plan = plan_of(schedule, dist.get_world_size(), stages_per_rank)
        self.whole, self.net = (self._made(make, dtype) for _ in range(2))
        self.runs = Runs(self.net, [])
        self.own = [stage.index for stage in self.plan.stages_of(self.rank)]
        self.modules = {stage: StageModule(stage, [self.net.stages[stage]], []) for stage in self.own}
        self.engine = PipelineEngine(
            self.plan,
            self.modules,
            self.runs,
            self.group,
            CPU,
            whole_backward=whole_backward,
            lazy_units=lazy_units,
        )

    def _made(self, make: Callable[[int], Net], dtype: torch.dtype) -> Net:
        torch.manual_seed(5)
        return make(len(self.plan.stages)).to(dtype)

    @property
    def has_last(self) -> bool:
        return self.rank == self.plan.last_rank

    def train(self, batches: Sequence[Tensor], weights: Sequence[float] | None = None) -> None:
        """Runs a step on both, and compares outputs and all gradients of this rank; they add up over steps."""
        weights = weights or [1 / len(batches)] * len(batches)
        outputs = self.engine.train(
            lambda index: batches[index],
            lambda index, output: weights[index] * output["loss"],
            [signature_of(batch) for batch in batches],
        )
        expected = {}
        for index, batch in enumerate(batches):
            expected[index] = self.on_one(batch)
            (weights[index] * expected[index]["loss"]).backward()
        self.compare(outputs, expected)
        self.compare_gradients()

    def evaluate(self, batches: Sequence[Tensor]) -> None:
        """Runs an evaluation on both and compares the outputs."""
        outputs = self.engine.evaluate(lambda index: batches[index], [signature_of(batch) for batch in batches])
        self.compare(outputs, {index: self.on_one(batch) for index, batch in enumerate(batches)})

    def on_one(self, x: Tensor) -> dict[str, Tensor]:
        received: tuple[Tensor, ...] = ()
        for stage in range(len(self.whole.stages)):
            received = self.whole.run(stage, received, x)
        return self.whole.output(received, x)

    def compare(self, outputs: dict[int, Any], expected: dict[int, Any]) -> None:
        assert list(outputs) == (list(expected) if self.has_last else []), f"rank {self.rank} has {list(outputs)}"
        for index in outputs:
            found, wanted = tree_flatten(outputs[index])[0], tree_flatten(expected[index])[0]
            assert not any(value.requires_grad for value in found), "outputs carry no graph"
            for value, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(value, want.detach())

    def compare_gradients(self) -> None:
        for stage in self.own:
            wanted = dict(self.whole.stages[stage].named_parameters())
            for name, parameter in self.net.stages[stage].named_parameters():
                want = wanted[name].grad
                if want is None and self.net.zeros_for_none:
                    assert parameter.grad is None or not parameter.grad.any(), f"stage {stage} {name}"
                    continue
                if want is None:
                    assert parameter.grad is None, f"stage {stage} {name}: a gradient that is not there on one device"
                    continue
                assert parameter.grad is not None, f"stage {stage} {name}: no gradient"
                found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
                assert torch.allclose(found, want, rtol=1e-12, atol=1e-14), f"stage {stage} {name}"

    def kinds(self) -> set[str]:
        """Returns the kinds of computation of all ranks since the start of the timeline."""
        return {event.action.kind for event in self.engine.stop_timeline().events}


def signature_of(batch: Tensor) -> Hashable:
    return tuple(batch.shape)


def batch_of(*lengths: int, samples: int = 2, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Micro-batches with sequences of these lengths, the same on all ranks."""
    made = torch.Generator().manual_seed(sum(lengths) + len(lengths))
    return [torch.randn(samples, length, WIDTH, dtype=dtype, generator=made) for length in lengths]


def ideal_bubble(ranks: int, microbatches: int) -> float:
    """Returns the bubble of GPipe and 1F1B with equal stages and free sends: (p - 1) / (m + p - 1).

    Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", section 2.3.

    Args:
        ranks: Degree of the pipeline axis, p.
        microbatches: Micro-batches of a batch, m.
    """
    return (ranks - 1) / (microbatches + ranks - 1)
