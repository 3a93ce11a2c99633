from __future__ import annotations

import itertools
import random
import re
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_3d.errors import ModuleError
from lightning_3d.graph.fake_run import FakeRun
from lightning_3d.graph.observer import EndPass, Observer, Proceed, ProceedModule
from tests.unit.graph.stacked import CLASSES, WIDTH, Block, Reads, Stacked, Watcher, batch, run


def test_blocks_that_repeat_run_once() -> None:
    watcher = Watcher()
    found = run(Stacked([Block(index, rate=0.1 * index + 0.1) for index in range(4)]), watcher)
    assert found == FakeRun(passes=1, blocks_run=1, blocks_repeated=3)
    assert watcher.repeats == [(f"blocks.{index}", "blocks.0") for index in (1, 2, 3)]
    assert watcher.modules == ["first", *(f"blocks.{index}" for index in range(4)), "head"]
    assert ("blocks.0", "linear") in watcher.functions
    assert (None, "linear") in watcher.functions
    assert not any(block == "blocks.1" for block, _ in watcher.functions)
    linears = ("first", "blocks.0.linear", "head")
    assert watcher.parameters == {f"{linear}.{name}" for linear in linears for name in ("weight", "bias")}
    (loss,) = watcher.outputs
    assert isinstance(loss, FakeTensor)
    assert loss.requires_grad


@pytest.mark.parametrize(
    "blocks",
    [
        [Block(0), Block(5)],
        [Block(0), Block(1, rate=0.5)],
        [Block(0), Block(1).eval()],
        [Block(0), Block(1).requires_grad_(False)],
    ],
    ids=["index", "rate", "mode", "frozen"],
)
def test_blocks_that_differ_run_each(blocks: list[Block]) -> None:
    assert run(Stacked(blocks)).blocks_run == 2


def test_blocks_with_hooks_run_each() -> None:
    module = Stacked([Block(index) for index in range(4)])
    heard: list[str] = []
    module.blocks[1].linear.register_forward_hook(lambda *args: heard.append("inside"))
    module.blocks[2].register_forward_hook(lambda *args: heard.append("outside"))
    assert run(module).blocks_repeated == 1
    assert heard == ["inside", "outside"]


def test_blocks_that_an_observer_needs_run_each() -> None:
    class Needs(Watcher):
        def must_run(self, block: str) -> bool:
            return block == "blocks.1"

    watcher = Needs()
    assert run(Stacked([Block(index) for index in range(3)]), watcher).blocks_run == 2
    assert watcher.repeats == [("blocks.2", "blocks.0")]


class Leaves(nn.Module):
    """Leaves its input, its output and a loss in attributes of a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.kept = {}

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        self.linear.kept = {"input": x, "output": y, "loss": y.square().mean()}
        return y, memory


class Fills(Leaves):
    """Puts its loss into a list that it has had before."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        self.losses.append(y.square().mean())
        return y, memory


def test_repeated_blocks_leave_tensors_in_attributes_too() -> None:
    module = Stacked([Leaves() for _ in range(3)])

    def step() -> Tensor:
        x, memory = module.first(batch()[0]), torch.zeros(1)
        for block in module.blocks:
            x, memory = block(x, memory)
        kept = [block.linear.kept for block in module.blocks]
        assert len({id(each["loss"]) for each in kept}) == 3
        assert all(after["input"] is before["output"] for before, after in itertools.pairwise(kept))
        assert all(each["loss"].shape == () and each["loss"].requires_grad for each in kept)
        return sum((each["loss"] for each in kept), torch.zeros(()))

    assert run(module, step=step) == FakeRun(passes=1, blocks_run=1, blocks_repeated=2)
    assert all(block.linear.kept == {} for block in module.blocks)


def test_blocks_that_fill_lists_run_each() -> None:
    module = Stacked([Fills() for _ in range(3)])

    def step() -> Tensor:
        module(batch()[0])
        return sum((block.losses[0] for block in module.blocks), torch.zeros(()))

    assert run(module, step=step).blocks_run == 3


def test_observers_that_tell_blocks_apart() -> None:
    class Names(Observer):
        def tells_apart(self, block: str) -> object:
            return block

    assert run(Stacked([Block(0), Block(1)]), Names()).blocks_run == 2


def test_no_trace_is_left() -> None:
    module = Stacked([Block(index) for index in range(2)])
    module.metric.update(torch.tensor(3.0))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    parameters = dict(module.named_parameters())
    kinds = [type(child) for child in module.modules()]
    attributes = [set(vars(child)) for child in module.modules()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    run(module, Watcher(passes=3))
    assert all(value is parameters[name] for name, value in module.named_parameters())
    assert not any(isinstance(value, FakeTensor) for value in module.state_dict().values())
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert [type(child) for child in module.modules()] == kinds
    assert [set(vars(child)) for child in module.modules()] == attributes
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert module.history == []
    assert float(module.metric.compute()) == 3.0
    assert all(parameter.grad is None for parameter in module.parameters())


def test_no_trace_after_an_error_either() -> None:
    module = Stacked([Block(0), Block(1)])
    kinds = [type(child) for child in module.modules()]
    with pytest.raises(ZeroDivisionError):
        run(module, step=lambda: (module.training_step(batch(), 0), 1 / 0))
    assert [type(child) for child in module.modules()] == kinds
    assert not any(isinstance(parameter, FakeTensor) for parameter in module.parameters())
    assert module.blocks[0].seen == 0


def test_loggers_hear_nothing(tmp_path: Path) -> None:
    class Logs(Stacked):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            self.logger.log_metrics({"loss": loss})
            return loss

    module, logger = Logs([Block(0), Block(1)]), CSVLogger(tmp_path)
    module.trainer = L.Trainer(logger=logger, accelerator="cpu", enable_progress_bar=False)
    run(module)
    assert logger.experiment.metrics == []
    assert module.logger is logger


def test_meta_modules_with_buffers_ties_and_frozen_parameters() -> None:
    with torch.device("meta"):
        module = Stacked([Block(0), Block(1)])
        module.blocks[1].linear.weight = module.blocks[0].linear.weight
        module.head.requires_grad_(False)
    watcher = Watcher()

    def step() -> Tensor:
        assert module.blocks[1].linear.weight is module.blocks[0].linear.weight
        assert not module.head.weight.requires_grad
        assert module.blocks[0].seen.device.type == "cpu"
        return module.training_step(batch(), 0)

    assert run(module, watcher, step=step).blocks_run == 1
    assert all(parameter.is_meta for parameter in module.parameters())
    assert module.blocks[0].seen.is_meta


def test_an_ended_pass_asks_for_another() -> None:
    class Impatient(Watcher):
        def around_module(self, name: str, args: Any, kwargs: Any, proceed: ProceedModule) -> Any:
            result = super().around_module(name, args, kwargs, proceed)
            if not self.outputs:
                raise EndPass
            return result

    class Swallows(Stacked):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            try:
                return super().training_step(batch, batch_idx)
            except Exception:
                return None

    watcher = Impatient(passes=2)
    found = run(Swallows([Block(0), Block(1)]), watcher)
    assert found.passes == 2
    assert watcher.outputs[0] is None
    assert isinstance(watcher.outputs[1], FakeTensor)


def test_the_first_observer_stands_outermost() -> None:
    seen = []

    class Named(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def around_function(self, function: Any, args: Any, kwargs: Any, proceed: Proceed) -> Any:
            if function is F.cross_entropy:
                seen.append(self.name)
            return proceed(function, args, kwargs)

        def around_module(self, name: str, args: Any, kwargs: Any, proceed: ProceedModule) -> Any:
            if name == "head":
                seen.append(self.name)
            return proceed(args, kwargs)

    run(Stacked([Block(0), Block(1)]), Named("outer"), Named("inner"))
    assert seen == ["outer", "inner"] * 2


def test_data_of_parameters_is_not_set() -> None:
    def sets(result: Tensor) -> Tensor:
        module.head.bias.data = module.head.bias.data * 0.9
        return result

    module = Reads(sets)
    fix = re.escape("parameter.copy_(...) under torch.no_grad()")
    with pytest.raises(ModuleError, match=rf"sets the data of head\.bias at .*test_fake_run\.py:\d+(.|\n)*{fix}"):
        run(module)


def test_other_data_is_set() -> None:
    def sets(result: Tensor) -> Tensor:
        module.blocks[0].seen.data = torch.ones(())
        return result + module.blocks[0].seen

    module = Reads(sets)
    assert run(module).passes == 1


# ---- manual optimization ----


def test_manual_optimization_runs_its_forward_passes() -> None:
    class Manual(Stacked):
        def __init__(self) -> None:
            super().__init__([Block(0), Block(1)])
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            first = torch.optim.SGD(self.blocks.parameters(), 0.1)
            return [first, torch.optim.SGD(self.head.parameters(), 0.1)], [torch.optim.lr_scheduler.StepLR(first, 1)]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, second = self.optimizers()
            with first.toggle_model():
                loss = super().training_step(batch, batch_idx)
            first.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(first, 1.0)
            first.step()
            second.step(lambda: self.head(batch[0]).sum())
            self.lr_schedulers().step()
            assert first.param_groups == []

    watcher = Watcher()
    run(Manual(), watcher)
    assert [name for name in watcher.modules if name == "head"] == ["head"] * 2


# ---- kinds of modules ----


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_that_keep_their_weights_in_lists(device: str) -> None:
    with torch.device(device):
        module = Reads(lambda result: result[0])
        module.head = nn.LSTM(WIDTH, CLASSES)
    weights = list(module.head._flat_weights)
    watcher = Watcher()
    run(module, watcher)
    assert isinstance(watcher.outputs[0], FakeTensor)
    assert all(after is before for after, before in zip(module.head._flat_weights, weights, strict=True))


def test_compiled_modules_run_as_they_are() -> None:
    module = Stacked([Block(0), Block(1)])
    module.head = torch.compile(module.head, backend="eager")
    watcher = Watcher()
    run(module, watcher)
    assert (None, "linear") in watcher.functions
