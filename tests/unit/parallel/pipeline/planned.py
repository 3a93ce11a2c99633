"""Plans of models on a pipeline, and small models that are hard to cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.parallel.pipeline.planning import find_pipeline_plan
from tests.parity.catalog import build, global_batches

WIDTH, BLOCKS = 8, 4


def plan(module: L.LightningModule, batch: Any, ranks: int = 2, **options: Any) -> PipelinePlan:
    return find_pipeline_plan(
        module,
        lambda: module.training_step(batch, 0),
        parameters=parameter_table(module),
        stacks=find_stacks(module),
        ranks=ranks,
        config=StrategyConfig(pipeline_parallel_size=ranks, **options),
    )


def plan_of(name: str, ranks: int = 2, **options: Any) -> PipelinePlan:
    return plan(build(name), global_batches(name, 1, 4)[0], ranks, **options)


def small_plan(model: nn.Module, ranks: int = 2, batch: Tensor | None = None, **options: Any) -> PipelinePlan:
    return plan(Small(model), states() if batch is None else batch, ranks, **options)


def states() -> Tensor:
    return torch.linspace(-1, 1, 2 * 3 * WIDTH).view(2, 3, WIDTH)


def received(found: PipelinePlan, stage: int) -> list[str]:
    """What a stage is sent, without shapes."""
    return [str(value.origin).removeprefix("output ") for value in found.boundaries[stage]]


def shared(found: PipelinePlan) -> dict[str, tuple[int, ...]]:
    return {name: stages for name, stages in found.holders.items() if len(stages) > 1}


def beside(found: PipelinePlan) -> dict[str, tuple[int, ...]]:
    """The stages of the watched modules that are no blocks."""
    return {name: stages for name, stages in found.modules.items() if name not in found.blocks}


class Small(L.LightningModule):
    """Any model on hidden states, with a loss that asks nothing of it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        output = self.model(batch)
        return output.square().mean() if isinstance(output, Tensor) else output


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Deep(nn.Module):
    """Blocks between an embedding and a head; ``between`` is what the container does before each block."""

    def __init__(
        self, between: Callable[[Deep, int, Tensor], Tensor] | None = None, blocks: int = BLOCKS, head: bool = True
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.leave = nn.Linear(WIDTH, WIDTH) if head else nn.Identity()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for index, block in enumerate(self.blocks):
            if self.between is not None:
                x = self.between(self, index, x)
            x = block(x)
        return self.leave(x)


class TiedHead(Deep):
    """The head is the first layer's weight, given to a function."""

    def __init__(self) -> None:
        super().__init__(head=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.enter.weight)


class Norms(Deep):
    """Each block's norm lies in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block(x))
        return self.leave(x)


class Lambdas(Deep):
    """The input of the stack is mixed in before each block, by a parameter of the container for each."""

    def __init__(self) -> None:
        super().__init__()
        self.lambdas = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = x0 = F.rms_norm(self.enter(x), (WIDTH,))
        for block, mix in zip(self.blocks, self.lambdas, strict=True):
            x = block(mix[0] * x + mix[1] * x0)
        return self.leave(x)


class Auxiliary(nn.Module):
    """Blocks return a loss beside the state, and the container sums the losses."""

    class Block(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            y = super().forward(x)
            return y, y.square().mean()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Auxiliary.Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            x, loss = block(x)
            total = total + loss
        return x.mean() + total


class Relative(nn.Module):
    """All blocks look up positions in one embedding that lies beside them, through a module they are given."""

    class Block(Block):
        def forward(self, x: Tensor, positions: nn.Module) -> Tensor:  # type: ignore[override]
            return super().forward(x) + positions(torch.arange(x.shape[1]))

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(3, WIDTH)
        self.blocks = nn.ModuleList(Relative.Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.positions)
        return x


class WithCopy(L.LightningModule):
    """Trains a model beside a copy of it that the step never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.copy, self.model = Deep(), Deep()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(batch).square().mean()
