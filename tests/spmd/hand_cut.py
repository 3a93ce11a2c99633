"""A small model cut into pipeline stages by hand, run by torch's schedules, for tests of what lives in stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import RESHARD, UNSHARD, get_schedule_class

from lightning_3d.parallel.pipeline.placement import ranks_of_stages
from lightning_3d.parallel.pipeline.stage_module import StageModule

WIDTH, VOCABULARY, LENGTH, MICROBATCH = 8, 12, 3, 2
TIED, SCALE = "embedding.weight", "scale.weight"
ONE_STAGE = ("gpipe", "1f1b")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


class Scale(nn.Module):
    """A parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, logits: Tensor) -> Tensor:
        return logits * self.weight


class Model(nn.Module):
    """Predicts tokens, with the same weights at both ends."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale = Scale()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.to(dtype)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.loss_of(hidden, targets)

    def loss_of(self, hidden: Tensor, targets: Tensor) -> Tensor:
        logits: Tensor = self.scale(self.head(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1).double(), targets.flatten())


class Stage(PipelineStage):
    """A stage whose gradients outlive a new schedule: torch drops them before the first step of each."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Nothing was inferred."""


class HandCut:
    """The stages of one rank, and torch's schedules of them.

    Args:
        schedule: Name of the schedule: one stage on each rank, or two.
        model: The whole model.
        group: The pipeline group.
    """

    def __init__(self, schedule: str, model: Model, group: dist.ProcessGroup) -> None:
        self.placed = ranks_of_stages(schedule, group.size(), 1 if schedule in ONE_STAGE else 2)
        self.count = len(self.placed)
        self.stages = {
            index: _stage_module(model, index, self.count)
            for index, rank in enumerate(self.placed)
            if rank == group.rank()
        }
        self.tied = tuple(sorted({self.placed[0], self.placed[-1]}))
        self._schedule, self._model, self._group = schedule, model, group
        self._batch: tuple[Tensor, Tensor] | None = None
        for stage in self.stages.values():
            stage.connect(self._run)

    def modules_of(self, stage: int) -> set[str]:
        """Returns the names of the modules that a stage calls."""
        ends = {0: {"embedding"}, self.count - 1: {"head", "scale"}}
        return {f"blocks.{block}" for block in _blocks(stage, self.count)} | ends.get(stage, set())

    def step(self, batches: tuple[Tensor, Tensor], *, lazy: bool = False) -> None:
        """Runs forward and backward of the micro-batches in the first dim of some inputs and targets."""
        self._batch = batches
        count = len(batches[0])
        kind: Any = get_schedule_class(self._schedule)
        made: Any = [self._torch_stage(index) for index in self.stages]
        given = made[0] if self._schedule in ONE_STAGE else made
        schedule = kind(given, count, loss_fn=lambda output, target: output, scale_grads=False)
        if self._schedule not in ONE_STAGE:
            schedule.register_custom_function(RESHARD, _stays)
            if lazy:
                schedule.register_custom_function(UNSHARD, _comes_later)
        schedule.step(mb=torch.arange(count), target=torch.arange(count), return_outputs=False)

    def _run(self, stage: int, received: tuple[Tensor, ...], microbatch: Tensor | int) -> Tensor:
        assert self._batch is not None
        # As torch's schedule cuts the numbers of all micro-batches: a tensor of one.
        ids, targets = (tensor[int(microbatch)] for tensor in self._batch)
        hidden = received[0] if received else self._model.embedding(ids)
        for block in _blocks(stage, self.count):
            hidden = self._model.blocks[block](hidden)
        last = stage == self.count - 1
        return self._model.loss_of(hidden, targets) / len(self._batch[0]) if last else hidden

    def _torch_stage(self, index: int) -> Stage:
        dtype = self._model.scale.weight.dtype
        hidden = torch.empty(MICROBATCH, LENGTH, WIDTH, dtype=dtype, device="meta", requires_grad=True)
        loss = torch.empty((), dtype=torch.float64, device="meta", requires_grad=True)
        return Stage(
            self.stages[index],
            index,
            self.count,
            torch.device("cpu"),
            input_args=(hidden,) if index else (),
            output_args=(loss if index == self.count - 1 else hidden,),
            group=self._group,
            # Backwards in halves are not for units.
            dw_builder=lambda: lambda: None,
        )


def batch(seed: int, microbatches: int) -> tuple[Tensor, Tensor]:
    """Returns the inputs and targets of some micro-batches."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(0, VOCABULARY, (2, microbatches, MICROBATCH, LENGTH), generator=generator)
    return made[0], made[1]


def _blocks(stage: int, stages: int) -> range:
    each = 4 // stages
    return range(stage * each, (stage + 1) * each)


def _stage_module(model: Model, stage: int, stages: int) -> StageModule:
    parts: list[nn.Module] = [model.blocks[block] for block in _blocks(stage, stages)]
    holders: list[tuple[nn.Module, frozenset[str]]] = []
    if stage == 0:
        parts.append(model.embedding)
        holders.append((model.head, frozenset({"weight"})))
    if stage == stages - 1:
        parts += [model.head, model.scale]
        holders.append((model.embedding, frozenset({"weight"})))
    return StageModule(stage, parts, holders)


def _stays(action: Any, context: Any) -> None:
    context.schedule_ref.unsharded_stages.discard(action.stage_index)


def _comes_later(action: Any, context: Any) -> None:
    context.schedule_ref.unsharded_stages.add(action.stage_index)
