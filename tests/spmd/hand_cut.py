"""A small model cut into pipeline stages by hand, run by torch's schedules, for tests of what lives in stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    RESHARD,
    UNSHARD,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    get_schedule_class,
)

from lightning_3d.parallel.pipeline.placement import ranks_of_stages

WIDTH, VOCABULARY, LENGTH, MICROBATCH = 8, 12, 3, 2
TORCH_NAMES = {"1f1b": "1F1B", "interleaved1f1b": "Interleaved1F1B", "zbvzerobubble": "ZBVZeroBubble"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.linear(self.norm(hidden)).tanh()


class Scale(nn.Module):
    """A parameter without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self, logits: Tensor) -> Tensor:
        return logits * self.weight


class Model(nn.Module):
    """Predicts tokens, with the same weights at both ends."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.scale = Scale()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.double()


class HandStage(nn.Module):
    """Some neighbouring blocks, and the ends of the model where they are its first or last ones."""

    def __init__(self, model: Model, blocks: Sequence[int]) -> None:
        super().__init__()
        self.first, self.last = 0 in blocks, len(model.blocks) - 1 in blocks
        self.parts = nn.ModuleDict({str(index): model.blocks[index] for index in blocks})
        if self.first or self.last:
            # Each end registers both places of the weight that it shares with the other.
            self.parts.update({"embedding": model.embedding, "head": model.head})
        if self.last:
            self.parts["scale"] = model.scale

    def forward(self, hidden: Tensor) -> Tensor:
        if self.first:
            hidden = self.parts["embedding"](hidden)
        for name, part in self.parts.items():
            hidden = part(hidden) if name.isdigit() else hidden
        return self.parts["scale"](self.parts["head"](hidden)) if self.last else hidden


class HandCut:
    """The stages of one rank, and torch's schedule of them."""

    def __init__(
        self, schedule: str, model: Model, group: dist.ProcessGroup, *, stages: int, microbatches: int
    ) -> None:
        self.ranks = ranks_of_stages(schedule, group.size(), stages // group.size())
        per_stage = len(model.blocks) // stages
        self.stages: Mapping[int, HandStage] = {
            index: HandStage(model, range(index * per_stage, (index + 1) * per_stage))
            for index, rank in enumerate(self.ranks)
            if rank == group.rank()
        }
        self._name, self._group, self._microbatches = schedule, group, microbatches
        self._schedule: Any = None

    def step(self, ids: Tensor, targets: Tensor, *, scale: float, lazy: bool) -> list[Tensor]:
        """Runs forward and backward of a batch; returns the losses on the rank of the last stage."""
        if self._schedule is None:
            self._schedule = self._make(scale, lazy)
        losses: list[Tensor] = []
        inputs = (ids,) if 0 in self.stages else ()
        self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        return [loss.detach() for loss in losses]

    def _make(self, scale: float, lazy: bool) -> PipelineScheduleSingle | PipelineScheduleMulti:
        made = [self._torch_stage(index) for index in self.stages]
        kind = get_schedule_class(TORCH_NAMES[self._name])
        given: Any = made[0] if issubclass(kind, PipelineScheduleSingle) else made

        def loss(logits: Tensor, target: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()) * scale

        schedule = kind(given, self._microbatches, loss_fn=loss, scale_grads=False)
        if isinstance(schedule, PipelineScheduleMulti):
            schedule.register_custom_function(RESHARD, _stays)
            if lazy:
                schedule.register_custom_function(UNSHARD, _comes_later)
        return schedule

    def _torch_stage(self, index: int) -> PipelineStage:
        hidden = torch.empty(MICROBATCH, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True)
        ids = torch.zeros(MICROBATCH, LENGTH, dtype=torch.int64)
        logits = torch.empty(MICROBATCH, LENGTH, VOCABULARY, dtype=torch.float64)
        last = index == len(self.ranks) - 1
        return PipelineStage(
            self.stages[index],
            index,
            len(self.ranks),
            torch.device("cpu"),
            input_args=hidden if index else ids,
            output_args=logits if last else hidden,
            group=self._group,
            dw_builder=lambda: lambda: None,
        )


def _stays(action: Any, context: Any) -> None:
    context.schedule_ref.unsharded_stages.discard(action.stage_index)


def _comes_later(action: Any, context: Any) -> None:
    context.schedule_ref.unsharded_stages.add(action.stage_index)
