"""Small modules, each with one habit of real ones."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.models import Learner
from tests.spmd.fits import normal

WIDTH, CLASSES = 6, 3


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(self.norm(hidden)))


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Plain(Learner):
    """A network and a loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__(Net(), **options)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.model(inputs), targets)


class Twice(Plain):
    """Two views through one network."""

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        first, second = self.model(inputs), self.model(inputs.flip(-1))
        return F.cross_entropy(first, targets) + F.mse_loss(first, second)


class Owner(Plain):
    """Owns parameters itself, calls parts of its network, and computes with its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.prompt = nn.Parameter(normal(0, 1, WIDTH, dtype=torch.float32))
        self.weight = nn.Parameter(normal(1, WIDTH, WIDTH, dtype=torch.float32))

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        hidden = F.linear(inputs * self.scale + self.prompt, self.weight)
        for block in self.model.blocks[:2]:
            hidden = block(hidden)
        return F.cross_entropy(self.model.head(self.model.blocks[3](self.model.blocks[2](hidden))), targets)


class Tied(Learner):
    """An embedding that is the output layer as well, by functional use only."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleDict({"wte": nn.Embedding(CLASSES, WIDTH), "net": Net(3)}))

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        hidden = inputs + self.model["wte"](targets.roll(1, 0))
        for block in self.model["net"].blocks:
            hidden = block(hidden)
        mixed = F.linear(hidden, self.model["wte"].weight) + self.model["net"].head(hidden)
        return F.cross_entropy(mixed, targets)


class Caller(Plain):
    """Calls itself in the step and in hooks around it."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.log("after_step", self(batch[0]).square().mean(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.log("after_epoch", self(torch.ones(2, WIDTH, dtype=torch.float64)).mean(), sync_dist=True)


class Heads(Plain):
    """Trains one of two heads and some of the blocks, another one each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, CLASSES)
        self.index = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.index = batch_idx
        return super().training_step(batch, batch_idx)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        odd = self.index % 2
        hidden = self.model.blocks[odd](inputs)
        return F.cross_entropy((self.other if odd else self.model.head)(hidden), targets)


class Frozen(Plain):
    """Half of the network does not train: whole blocks, and the norm of another one."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.model.blocks[0], self.model.blocks[2], self.model.blocks[3].norm):
            part.requires_grad_(False)


class Adapted(Plain):
    """Frozen weights with small trained matrices beside them; only these are in the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.model.requires_grad_(False)
        for block in self.model.blocks:
            block.linear = Adapter(block.linear)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(normal(2, 2, WIDTH, dtype=torch.float32))
        self.up = nn.Parameter(normal(3, WIDTH, 2, dtype=torch.float32))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base(hidden) + F.linear(F.linear(hidden, self.down), self.up)


class Regularised(Plain):
    """Adds a penalty on all of its own parameters."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * sum(parameter.square().sum() for parameter in self.parameters())


class RegularisedFirst(Plain):
    """The same, before its network was called."""

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(parameter.square().sum() for parameter in self.parameters())
        return super().loss(batch) + 0.01 * penalty


class Borrows(Plain):
    """Computes with the weight of a block outside of it."""

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.model(F.linear(inputs, self.model.blocks[0].linear.weight)), targets)


def classified(count: int, samples: int) -> tuple[Any, ...]:
    """Batches of inputs and classes, in fp64."""
    generator = torch.Generator().manual_seed(1)
    return tuple(
        (normal(index, samples, WIDTH), torch.randint(0, CLASSES, (samples,), generator=generator))
        for index in range(count)
    )


class Gan(L.LightningModule):
    """Two networks that train against each other, each for several batches before it steps."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = Net(2), nn.Sequential(nn.Linear(CLASSES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
        self.every = every

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, targets = batch
        real = F.one_hot(targets, CLASSES).to(inputs)
        step = (batch_idx + 1) % self.every == 0
        for index, optimizer in enumerate(self.optimizers()):  # type: ignore[arg-type]
            with optimizer.toggle_model(sync_grad=step):
                made = self.maker(inputs)
                if index == 0:
                    loss = F.softplus(-self.judge(made)).mean()
                    self.manual_backward(loss)
                else:
                    # Two backward passes for one step.
                    fake = F.softplus(self.judge(made.detach())).mean()
                    self.manual_backward(fake)
                    loss = F.softplus(-self.judge(real)).mean()
                    self.manual_backward(loss)
                if step:
                    self.clip_gradients(optimizer, 0.5, "norm")
                    optimizer.step()
                    optimizer.zero_grad()
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(part.parameters(), lr=3e-3) for part in (self.maker, self.judge)]


class ClipsItself(Plain):
    """Clips with torch's own function between backward and step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("norm", norm)
        optimizer.step()


class SometimesRegularised(Plain):
    """Adds a penalty on its blocks before it calls them, but not in every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.index = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.index = batch_idx
        return super().training_step(batch, batch_idx)

    def loss(self, batch: Any) -> Tensor:
        blocks = self.model.blocks.parameters() if self.index % 2 else ()
        penalty = sum(parameter.square().sum() for parameter in blocks)
        return super().loss(batch) + 0.01 * penalty


class Temperature(Plain):
    """Scalars among its parameters, in a block and beside them; one of them is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.seldom = nn.Parameter(torch.tensor(1.0))
        for block in self.model.blocks:
            block.norm = Gain()
        self.index = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.index = batch_idx
        return super().training_step(batch, batch_idx)

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        logits = self.model(inputs) * self.temperature.exp()
        return F.cross_entropy(logits * self.seldom if self.index == 2 else logits, targets)


class Gain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.gain
