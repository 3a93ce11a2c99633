"""Steps that stages cannot share out: one error before training that names the place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_3d.errors import ModuleError
from tests.unit.parallel.pipeline.planned import BLOCKS, WIDTH, Block, Deep, Small, plan, received, small_plan, states

Between = Callable[[Deep, int, Tensor], Tensor]


def _reads_if(model: Deep, index: int, x: Tensor) -> Tensor:
    return x if x.abs().max() < 100 else x / 2


def _reads_item(model: Deep, index: int, x: Tensor) -> Tensor:
    return x * x.mean().item()


def _reads_finite(model: Deep, index: int, x: Tensor) -> Tensor:
    assert torch.isfinite(x).all()
    return x


def _reads_mask(model: Deep, index: int, x: Tensor) -> Tensor:
    return x + x[x > 0].sum()


def _reads_numpy(model: Deep, index: int, x: Tensor) -> Tensor:
    return x + float(x.detach().numpy().sum())


@pytest.mark.parametrize("read", [_reads_if, _reads_item, _reads_finite, _reads_mask, _reads_numpy])
def test_values_read_between_blocks(read: Between) -> None:
    with pytest.raises(
        ModuleError, match=r"in Deep \(.*reads values of a hidden state before the last block"
    ) as caught:
        small_plan(Deep(read))
    assert f"{Path(__file__).name}:{read.__code__.co_firstlineno + 1}" in str(caught.value)


def _adds_to_local(model: Deep, index: int, x: Tensor) -> Tensor:
    total = torch.zeros(x.shape)
    total.add_(x)
    return total


def _sets_rows(model: Deep, index: int, x: Tensor) -> Tensor:
    rows = torch.zeros(x.shape)
    rows[:, 0] = x[:, 0]
    return rows


def _writes_out(model: Deep, index: int, x: Tensor) -> Tensor:
    total = torch.zeros(x.shape)
    with torch.no_grad():
        torch.add(x, 1, out=total)
    return total + x


@pytest.mark.parametrize(
    ("write", "name"), [(_adds_to_local, "add_"), (_sets_rows, "__setitem__"), (_writes_out, "add")]
)
def test_writes_into_tensors_of_the_batch(write: Between, name: str) -> None:
    with pytest.raises(ModuleError, match=f"{name} in Deep .*writes a hidden value into a tensor that has none"):
        small_plan(Deep(write))


class Attribute(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.loss = y.square().mean()
        return y


class Losses(nn.Module):
    """Reads what its blocks leave in attributes, after all of them or after each."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attribute() for _ in range(BLOCKS))
        self.late = late

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            x = block(x)
            total = total if self.late else total + block.loss
        return x.mean() + total + sum(block.loss for block in self.blocks if self.late)


@pytest.mark.parametrize("late", [True, False])
def test_losses_left_in_attributes(late: bool) -> None:
    with pytest.raises(ModuleError, match=r"it is the attribute model\.blocks\.0\.loss, which other stages"):
        small_plan(Losses(late))


class Collects(nn.Module):
    """Its blocks put losses into a list that they are given, or in one of their own."""

    class Block(Block):
        def forward(self, x: Tensor, losses: list[Tensor]) -> Tensor:  # type: ignore[override]
            y = super().forward(x)
            losses.append(y.square().mean())
            return y

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Collects.Block() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for block in self.blocks:
            x = block(x, losses)
        return x.mean() + torch.stack(losses).sum()


def test_losses_put_into_a_list() -> None:
    with pytest.raises(ModuleError, match=r"it was made inside model\.blocks\.0"):
        small_plan(Collects())


class Borrows(nn.Module):
    """Every block reads what the one before has left behind."""

    class Block(Attribute):
        before: list[Attribute]

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + sum(block.loss for block in self.before)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Borrows.Block() for _ in range(BLOCKS))
        before: list[Attribute] = []
        for block in self.blocks:
            assert isinstance(block, Borrows.Block)
            block.before = list(before)
            before = [block]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_what_another_block_has_left() -> None:
    with pytest.raises(ModuleError, match=r"comes to model\.blocks\.1 .*without having been returned"):
        small_plan(Borrows())


class Double(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def test_values_that_torch_does_not_show() -> None:
    def hide(model: Deep, index: int, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return x * 2

    with pytest.raises(ModuleError, match=r"a hidden value comes to Deep \(.* from nowhere"):
        small_plan(Deep(hide))


def test_autograd_functions_are_shown() -> None:
    found = small_plan(Deep(lambda model, index, x: Double.apply(x)))
    assert received(found, 1) == ["0 of mul"]


def test_after_the_last_block_anything_goes() -> None:
    class Late(Small):
        def __init__(self) -> None:
            super().__init__(Deep())
            self.metric = MeanMetric()

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            x = self.model(batch)
            loss = Double.apply(x).square().mean()
            kept = torch.zeros(2)
            kept[0] = loss.detach()
            self.metric(kept[0])
            self.log("item", loss.item())
            return loss if torch.isfinite(loss) else loss * 0

    assert len(plan(Late(), states()).stages) == 2


class Order(nn.Module):
    """Calls its blocks in the order that it is given."""

    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


@pytest.mark.parametrize(
    ("order", "text"),
    [
        ([0, 0, 1, 2], r"model\.blocks\.0 is called twice in one step"),
        ([0, 1, 2, 0, 1, 2], "the whole stack is called twice in one step"),
        ([0, 2], r"the step does not call model\.blocks\.1, and"),
        ([0], r"the step does not call model\.blocks\.1 and 1 others"),
        ([], r"does not call model\.blocks\.0 and 2 others"),
    ],
)
def test_blocks_that_are_not_called_once(order: list[int], text: str) -> None:
    with pytest.raises(ModuleError, match=text):
        small_plan(Order(order))


def test_blocks_are_numbered_as_they_are_called() -> None:
    assert small_plan(Order([2, 0, 1])).blocks == ("model.blocks.2", "model.blocks.0", "model.blocks.1")


def test_a_block_inside_another() -> None:
    class Outer(Block):
        inner: tuple[Block, ...] = ()

        def forward(self, x: Tensor) -> Tensor:
            for block in self.inner:
                x = block(x)
            return super().forward(x)

    model = nn.Sequential(Outer(), Outer())
    model[0].inner = (model[1],)
    with pytest.raises(ModuleError, match=r"model\.1 is called inside model\.0"):
        small_plan(model)


class Measures(Small):
    def __init__(self) -> None:
        super().__init__(Deep(self.measure))
        self.metric = MeanMetric()

    def measure(self, model: Deep, index: int, x: Tensor) -> Tensor:
        self.metric.update(x.mean())
        return x


def test_metrics_between_blocks() -> None:
    with pytest.raises(ModuleError, match=r"the metric metric is given hidden values in .* before the last block"):
        plan(Measures(), states())


def test_metrics_of_the_batch_are_fine() -> None:
    class Batches(Measures):
        def measure(self, model: Deep, index: int, x: Tensor) -> Tensor:
            self.metric.update(torch.ones(()))
            return x

    assert len(plan(Batches(), states()).stages) == 2


class Manual(Small):
    def __init__(self) -> None:
        super().__init__(Deep())
        self.automatic_optimization = False


class OwnBackward(Small):
    def __init__(self) -> None:
        super().__init__(Deep())

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "text"), [(Manual, "automatic_optimization=False"), (OwnBackward, "OwnBackward overrides backward")]
)
def test_modules_that_go_backward_themselves(kind: Callable[[], L.LightningModule], text: str) -> None:
    with pytest.raises(ModuleError, match=text):
        plan(kind(), states())


class SharedNorm(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = self.norm(block(x))
        return self.leave(x)


def test_running_statistics_of_several_stages() -> None:
    with pytest.raises(ModuleError, match=r"model\.norm keeps running statistics and is called on stages 0, 1"):
        small_plan(SharedNorm())
    model = SharedNorm()
    model.norm = nn.BatchNorm1d(3, track_running_stats=False)
    assert small_plan(model).modules["model.norm"] == (0, 1)


def test_statistics_on_one_stage_are_fine() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(3), nn.Linear(WIDTH, WIDTH))
    assert len(small_plan(model).modules["model.1"]) == 1


class Views(Deep):
    """Writes to a tensor and reads a view of it, both made before the stack or one of them after each block."""

    def __init__(self, early: bool) -> None:
        super().__init__()
        self.early = early

    def forward(self, x: Tensor) -> Tensor:
        whole = self.enter(x)
        rows = whole[:, 0]
        for block in self.blocks:
            part = rows if self.early else whole[:, 0]
            part += 1
            x = block(whole)
        return self.leave(x)


def test_writes_to_a_view_of_what_was_sent() -> None:
    with pytest.raises(ModuleError, match=r"output 0 of model\.enter is used in .* after another view of its memory"):
        small_plan(Views(early=True))
    assert received(small_plan(Views(early=False)), 1) == ["0 of model.enter"]
