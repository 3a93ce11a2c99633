"""A small module with a stack of blocks, and an observer that writes down what it sees."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.fake_run import FakeRun, fake_run
from lightning_3d.graph.observer import Observer, Proceed, ProceedModule, Scene, ValueRead

WIDTH, CLASSES = 8, 5


class Block(nn.Module):
    def __init__(self, index: int, rate: float = 0.0) -> None:
        super().__init__()
        self.index, self.rate = index, rate
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += 1
        self.last = x
        return F.dropout(x + self.linear(x), self.rate), memory


class Stacked(L.LightningModule):
    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.metric = MeanMetric()
        self.history: list[float] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = memory = self.first(x)
        for block in self.blocks:
            x, memory = block(x, memory)
        return self.head(x), memory

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        logits, memory = self(x + torch.rand(()))
        assert memory.shape == x.shape
        loss = F.cross_entropy(logits, target)
        self.metric(loss)
        self.history.append(random.random())
        np.random.rand()
        return loss


class Listener(Observer):
    """Lets values pass that have to be made up."""

    def __init__(self) -> None:
        self.reads: list[ValueRead] = []

    def value_read(self, read: ValueRead) -> bool:
        self.reads.append(read)
        return True


class Watcher(Observer):
    """Writes down what it sees, and makes passes as it is told."""

    def __init__(self, passes: int = 1) -> None:
        self.passes = passes
        self.functions: list[tuple[str | None, str]] = []
        self.modules: list[str] = []
        self.repeats: list[tuple[str, str]] = []
        self.outputs: list[Any] = []
        self.parameters: set[str] = set()

    def begin(self, scene: Scene) -> None:
        self.scene = scene

    def around_function(self, function: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
        self.functions.append((self.scene.block, function.__name__))
        self.parameters.update(filter(None, map(self.scene.name_of, args)))
        return proceed(function, args, kwargs)

    def around_module(self, name: str, args: Any, kwargs: Any, proceed: ProceedModule) -> Any:
        self.modules.append(name)
        return proceed(args, kwargs)

    def repeated(self, block: str, first: str) -> None:
        self.repeats.append((block, first))

    def end(self, output: Any) -> bool:
        self.outputs.append(output)
        return len(self.outputs) < self.passes


def batch(samples: int = 4) -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, samples * WIDTH).view(samples, WIDTH), torch.arange(samples) % CLASSES


def run(module: L.LightningModule, *observers: Observer, step: Callable[[], Any] | None = None) -> FakeRun:
    made = batch()
    return fake_run(
        module,
        step or (lambda: module.training_step(made, 0)),
        stacks=find_stacks(module),
        observers=observers,
    )


class Reads(Stacked):
    """Reads a hidden state in the way of the test."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__([Block(0), Block(1)])
        self.read = read
        self.got: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.read(self.head(batch[0]))
