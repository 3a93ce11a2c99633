from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import ModuleError
from lightning_3d.parallel.pipeline.run.placeholder import Placeholder, resolve
from tests.unit.parallel.pipeline.run.alone import Alone, world_of_one

WIDTH = 4


class Net(L.LightningModule):
    """Four blocks; what happens between them is the test's own."""

    def __init__(self, between: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.leave = nn.Linear(WIDTH, 1)
        self.between = between
        self.kept: dict[str, Any] = {}
        self.twist = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        h = self.between(self, self.enter(batch))
        return h if h.dim() == 0 else self.leave(h).mean()


def plain(net: Net, h: Tensor) -> Tensor:
    for block in net.blocks:
        h = block(h)
    return h


def batch() -> Tensor:
    return torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with world_of_one():
        yield


def check(between: Callable[[Net, Tensor], Tensor]) -> Net:
    """Fails if two stages do not give what one process gives."""
    whole, cut = Net(between), Net(between)
    loss = whole.training_step(batch(), 0)
    loss.backward()
    assert torch.equal(Alone(cut, batch()).backward(), loss.detach())
    for (name, parameter), other in zip(cut.named_parameters(), whole.parameters(), strict=True):
        assert parameter.grad is not None, name
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-6, atol=1e-7)
    return cut


def changed(between: Callable[[Net, Tensor], Tensor]) -> tuple[Alone, Net]:
    """A step that does something else than when it was recorded."""
    net = Net(between)
    alone = Alone(net, batch())
    net.twist = True
    return alone, net


def test_two_stages_give_what_one_process_gives() -> None:
    check(plain)


def writing(net: Net, h: Tensor) -> Tensor:
    first = h
    for block in net.blocks:
        h = block(h)
        h += 0.5
        h[:, 0] *= 2
        h.mul_(0.9)
    return h + first


def test_hidden_states_may_be_written_to_in_place() -> None:
    check(writing)


def same(net: Net, h: Tensor) -> Tensor:
    turned = h.t().contiguous()
    again = h.contiguous().float()
    h = plain(net, again)
    return h + turned.t() + again


def test_functions_that_may_return_their_argument() -> None:
    check(same)


def of_frequencies(net: Net, h: Tensor) -> Tensor:
    for block in net.blocks:
        h = block(h + torch.fft.fft(h).real + h.real)
    return h


def test_properties_that_compute_are_functions() -> None:
    check(of_frequencies)


def catching(net: Net, h: Tensor) -> Tensor:
    for block in net.blocks:
        try:
            h = block(h)
        except Exception:
            h = torch.zeros_like(h)
    return h


def test_code_that_catches_errors_does_not_catch_the_end_of_a_stage() -> None:
    check(catching)


def catching_all(net: Net, h: Tensor) -> Tensor:
    for block in net.blocks:
        try:
            h = block(h)
        except BaseException:
            net.kept["caught"] = True
    return h


def test_code_that_catches_everything_is_left_all_the_same() -> None:
    assert check(catching_all).kept["caught"]


class Counting(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_a_mode(net: Net, h: Tensor) -> Tensor:
    with Counting():
        return plain(net, h * 2)


def test_users_may_have_modes_of_functions_of_their_own() -> None:
    check(under_a_mode)


def test_inside_modules_no_mode_is_active() -> None:
    net = Net(plain)
    seen: list[Any] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        if type(output) is Tensor:
            seen.append(_get_current_function_mode())

    net.blocks[0].register_forward_hook(look)
    Alone(net, batch()).first()
    assert seen
    assert seen == [None] * len(seen)


def checkpointing(net: Net, h: Tensor) -> Tensor:
    for block in net.blocks:
        h = checkpoint(block, h, use_reentrant=False)
    return h


def checkpointing_more(net: Net, h: Tensor) -> Tensor:
    def part(h: Tensor) -> Tensor:
        return net.blocks[3](torch.tanh(net.blocks[2](h * 2)))

    return checkpoint(part, net.blocks[1](net.blocks[0](h)), use_reentrant=False)


def checkpointing_all(net: Net, h: Tensor) -> Tensor:
    h = checkpoint(lambda h: net.blocks[1](net.blocks[0](h).tanh()), h, use_reentrant=False)
    return checkpoint(lambda h: net.blocks[3](net.blocks[2](h).tanh()), h, use_reentrant=False)


@pytest.mark.parametrize("between", [checkpointing, checkpointing_all])
def test_code_around_blocks_may_be_checkpointed(between: Callable[[Net, Tensor], Tensor]) -> None:
    check(between)


def checkpointing_reentrantly(net: Net, h: Tensor) -> Tensor:
    for block in net.blocks:
        h = checkpoint(block, h, use_reentrant=True)
    return h


def test_a_checkpoint_around_code_of_several_stages_is_refused() -> None:
    alone = Alone(Net(checkpointing_more), batch())
    with pytest.raises(ModuleError, match="checkpoint is around code of several stages"):
        alone.second(alone.first())


def test_a_reentrant_checkpoint_around_blocks_is_refused() -> None:
    with pytest.raises(ModuleError, match=r"a reentrant torch.utils.checkpoint is around blocks\.0"):
        Alone(Net(checkpointing_reentrantly), batch())


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def own_function(net: Net, h: Tensor) -> Tensor:
    start = h
    h = plain(net, h)
    return h + Doubled.apply(start)  # type: ignore[no-untyped-call]


def test_functions_of_autograd_take_what_was_received() -> None:
    check(own_function)


def keeping(net: Net, h: Tensor) -> Tensor:
    net.kept["start"] = h
    net.kept["copy"] = deepcopy(h) if isinstance(h, Placeholder) else None
    return plain(net, h)


def test_what_was_kept_before_the_stage_began_is_known_after_it() -> None:
    net = Net(keeping)
    alone = Alone(net, batch())
    sent = alone.first()
    alone.second(sent)
    assert torch.equal(resolve(net.kept["start"]), net.enter(batch())), "attributes are those of the last stage"


def logging(net: Net, h: Tensor) -> Tensor:
    net.log("start", h.abs().mean())
    return plain(net, h)


def test_values_logged_early_are_sent() -> None:
    net = Net(logging)
    found: dict[str, Any] = {}
    net.log = lambda name, value: found.update({name: value})  # type: ignore[assignment, method-assign]
    alone = Alone(net, batch())
    alone.second(alone.first())
    assert torch.equal(resolve(found["start"]), net.enter(batch()).abs().mean().detach())


def hooked(net: Net, h: Tensor) -> Tensor:
    net.kept["outputs"] = []
    return plain(net, h) + net.kept["outputs"][0]


def test_hooks_of_the_user_hear_of_blocks_that_run_elsewhere() -> None:
    def built() -> Net:
        net = Net(hooked)
        net.blocks[0].register_forward_hook(lambda module, args, output: net.kept["outputs"].append(output))
        return net

    whole, cut = built(), built()
    loss = whole.training_step(batch(), 0)
    loss.backward()
    assert torch.equal(Alone(cut, batch()).backward(), loss.detach())
    assert type(cut.kept["outputs"][0]) is Tensor, "it has become what was received"
    for parameter, other in zip(cut.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-6, atol=1e-7)


def test_a_placeholder_tells_all_but_its_values() -> None:
    seen: list[Any] = []

    def asking(net: Net, h: Tensor) -> Tensor:
        if isinstance(h, Placeholder):
            h.register_hook(lambda gradient: gradient)
            h.retain_grad()
            seen.append((h.shape, h.dtype, h.device, h.requires_grad, len(h), h.dim(), f"{h}"))
        return plain(net, h)

    check(asking)
    shown = "Placeholder(output 0 of enter, [3, 4])"
    assert seen == [(torch.Size([3, 4]), torch.float32, torch.device("cpu"), True, 3, 2, shown)]


# ---- refusals ----


def reading(net: Net, h: Tensor) -> Tensor:
    if net.twist and h.sum() > 0:
        h = h * 2
    return plain(net, h)


def later_use(net: Net, h: Tensor) -> Tensor:
    out = plain(net, h)
    return out + h if net.twist else out


def later_use_inside(net: Net, h: Tensor) -> Tensor:
    start = h
    for index, block in enumerate(net.blocks):
        h = block(start if net.twist and index == 3 else h)
    return h


def other_order(net: Net, h: Tensor) -> Tensor:
    for index in (0, 1, 3, 2) if net.twist else range(4):
        h = net.blocks[index](h)
    return h


def early_end(net: Net, h: Tensor) -> Tensor:
    return h.mean() if net.twist else plain(net, h)


def another_call(net: Net, h: Tensor) -> Tensor:
    return plain(net, net.leave(h).expand(-1, WIDTH) if net.twist else h)


def other_shape(net: Net, h: Tensor) -> Tensor:
    return plain(net, h[:2] if net.twist else h)


@pytest.mark.parametrize(
    ("between", "text"),
    [
        (reading, "reads values of a hidden state"),
        (later_use, r"add at .*test_stage_run.py:\d+ uses output 0 of enter"),
        (later_use_inside, r"blocks.3 at .*test_stage_run.py:\d+ uses output 0 of enter"),
        (other_order, "blocks.3 is called at .*test_stage_run.py.* where blocks.2 was called"),
        (early_end, "the step ends before blocks.0 is called"),
        (another_call, "leave is called at .*, and was not when"),
    ],
)
def test_another_step_than_the_recorded_one_is_refused(between: Callable[[Net, Tensor], Tensor], text: str) -> None:
    net = Net(between)
    alone = Alone(net, batch())
    sent = alone.first()
    net.twist = True
    with pytest.raises(ModuleError, match=text):
        alone.second(sent)


def test_other_shapes_than_the_recorded_ones_are_refused() -> None:
    alone, _ = changed(other_shape)
    with pytest.raises(ModuleError, match=r"is \[2, 4\] float32, and was \[3, 4\] float32"):
        alone.first()


def test_a_record_without_gradients_does_not_serve_training() -> None:
    net = Net(plain)
    alone = Alone(net, batch())
    with torch.no_grad():
        alone.record = alone.runs.record(alone.step)
    assert not any(value.requires_grad for values in alone.record.boundaries for value in values)
    with pytest.raises(ModuleError, match="needs a gradient, and did not"):
        alone.first()
    with torch.no_grad():
        assert torch.equal(alone.second(alone.first())[0], Net(plain).training_step(batch(), 0).detach())
