"""What steps keep in attributes of the module: every pipeline rank has what one device has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning import LightningModule
from torch import Tensor, nn

from lightning_3d.errors import ModuleError
from tests.spmd.pipeline_watched import TWO, samples, values
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import Ranks, seen_alike
from tests.spmd.toys import WIDTH, Net

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]
SCHEDULES = ["1f1b", "interleaved1f1b", "zbvzerobubble"]


class Keeps(LightningModule):
    """Results of steps for the end of the epoch, in lists, dicts, numbers and tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Net()
        self.outs: list[Any] = []
        self.answers: list[dict[str, Tensor]] = []
        self.sums: dict[str, Tensor] = {"loss": torch.zeros(())}
        self.count, self.running, self.best = 0, torch.zeros(()), float("inf")
        self.ends: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        # Before the first block: each stage counts on for itself, and the last one counts for all.
        self.count += 1
        loss = F.cross_entropy(self.model(batch[0] * (1 + 0.1 * self.count)), batch[1])
        self.outs.append(loss.detach())
        self.sums["loss"] += loss.detach()
        self.running = self.running * 0.9 + loss.detach() * 0.1
        self.best = min(self.best, loss.item())
        return loss * (1 + 0.1 * self.count)

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append([self.count, float(self.sums["loss"]), float(self.running), self.best, len(self.outs)])

    def on_train_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.outs).mean())
        self.outs.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.answers.append({"logits": self.model(batch[0]), "targets": batch[1]})

    def on_validation_epoch_end(self) -> None:
        logits = torch.cat([each["logits"] for each in self.answers])
        self.log("val", F.cross_entropy(logits, torch.cat([each["targets"] for each in self.answers])))
        self.answers.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def kept(ranks: Ranks) -> Any:
    module = Keeps()
    options = {"num_microbatches": 2}
    trainer = ranks.trainer(max_epochs=2, num_sanity_val_steps=0, strategy=options)
    trainer.fit(module, samples(12), samples(7))
    return values(trainer), module.ends


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_attributes_of_steps_are_those_of_one_device(schedule: str) -> None:
    found, ends = seen_alike(kept, **TWO, pipeline_schedule=schedule)
    assert {"mean", "val"} <= set(found)
    assert [end[0] for end in ends] == [2, 4, 6, 8, 10, 12]


class Between(Keeps):
    """Writes in place between its blocks, through views and ``out``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, *others = self.model.blocks
        h = first(batch[0])
        total = torch.zeros_like(h)
        for index, block in enumerate(others):
            h = block(h)
            total += h.detach()
            total[:, index] *= 2
            torch.add(total, 1.0, out=total)
            F.leaky_relu(total, 0.1, True)
        self.outs.append(total.mean())
        return F.cross_entropy(self.model.head(h + total), batch[1]) + total.std() * h.mean()


class Measured(nn.Module):
    """Leaves a number as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.linear(hidden)
        self.spread = float(out.detach().abs().mean())
        return out


class Statistic(Keeps):
    """Reads what its blocks leave."""

    def __init__(self) -> None:
        super().__init__()
        self.model.blocks = nn.ModuleList(Measured() for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("spread", sum(block.spread for block in self.model.blocks))
        return loss


def read_elsewhere(rank: int, world: int) -> str:
    module = Statistic()
    trainer = Ranks(world=world, strategy=TWO).trainer(strategy={"num_microbatches": 2})
    with pytest.raises(ModuleError) as caught:
        trainer.fit(module, samples(8), samples(4))
    return str(caught.value)


def test_attributes_of_blocks_are_refused_by_name_on_every_rank() -> None:
    for told in run_spmd(read_elsewhere, 2):
        assert "model.blocks" in told
        assert "has no attribute 'spread'" in told
        assert "test_pipeline_attributes.py" in told
        assert "return it from the module" in told


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_writes_in_place_between_blocks_are_exact(schedule: str) -> None:
    seen_alike(between, **TWO, pipeline_schedule=schedule)


def between(ranks: Ranks) -> Any:
    module = Between()
    trainer = ranks.trainer(max_epochs=1, strategy={"num_microbatches": 2})
    trainer.fit(module, samples(8), samples(4))
    return values(trainer)
