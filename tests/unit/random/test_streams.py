from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import ModuleError
from lightning_3d.random.streams import RandomStreams, default_generators, seeded


def draw(streams: RandomStreams, *names: str) -> Tensor:
    """Draws inside nested streams, outermost first."""
    if not names:
        return torch.rand(3)
    with streams.stream(names[0]):
        return draw(streams, *names[1:])


def test_stream_depends_on_seed_step_microbatch_name_and_call() -> None:
    streams, other_seed = RandomStreams(1), RandomStreams(2)
    drawn = []
    for step, microbatch in [(0, 0), (0, 1), (1, 0)]:
        streams.at(step=step, microbatch=microbatch)
        drawn += [draw(streams, "a"), draw(streams, "a"), draw(streams, "b"), draw(streams, "b", "a")]
    drawn.append(draw(other_seed, "a"))
    assert len({tuple(values.tolist()) for values in drawn}) == len(drawn)


def test_a_call_that_another_rank_makes_is_skipped() -> None:
    streams = RandomStreams(1)
    streams.at(step=0, microbatch=0)
    draw(streams, "block")
    second = draw(streams, "block")
    streams.at(step=0, microbatch=0)
    streams.skip("block")
    assert torch.equal(draw(streams, "block"), second)


def test_coming_back_to_a_position_gives_the_same_streams_whatever_ran_before() -> None:
    streams = RandomStreams(1)
    streams.at(step=3, microbatch=5)
    first = [draw(streams, "outer", "block"), draw(streams, "outer", "block"), draw(streams, "head")]
    torch.rand(100)
    streams.at(step=3, microbatch=6)
    draw(streams, "head")
    again = RandomStreams(1)
    again.at(step=3, microbatch=5)
    # Another layout: the first block runs elsewhere, but its container is entered here as well.
    assert torch.equal(draw(again, "head"), first[2])
    assert torch.equal(draw(again, "outer", "block"), first[0])
    streams.at(step=3, microbatch=5)
    assert torch.equal(draw(streams, "outer", "block"), first[0])
    assert torch.equal(draw(streams, "outer", "block"), first[1])


def test_outer_generators_continue_undisturbed() -> None:
    streams = RandomStreams(1)
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    got = [torch.rand(1)]
    with streams.stream("a"):
        torch.rand(7)
        inside = torch.get_rng_state()
        with streams.stream("b"):
            torch.rand(3)
            torch.manual_seed(0)
        assert torch.equal(torch.get_rng_state(), inside)
    got.append(torch.rand(1))
    with pytest.raises(KeyError), streams.stream("a"):
        raise KeyError
    got.append(torch.rand(2))
    assert torch.equal(torch.cat(got), expected)


def test_python_and_numpy_draw_from_the_stream_that_asks_for_it() -> None:
    def drawn(streams: RandomStreams, step: int) -> tuple[float, float, float]:
        streams.at(step=step, microbatch=0)
        with streams.stream("step", host=True):
            return random.random(), float(numpy.random.rand()), float(numpy.random.randn())

    random.seed(1)
    numpy.random.seed(1)
    before = random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index]
    first, second = drawn(RandomStreams(1), 0), drawn(RandomStreams(1), 1)
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before  # type: ignore[index]
    random.seed(2)
    numpy.random.randn()
    assert first == drawn(RandomStreams(1), 0)
    assert not set(first) & set(second)


def test_python_and_numpy_generators_are_not_touched() -> None:
    before = random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index]
    draw(RandomStreams(1), "a", "b")
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before  # type: ignore[index]


def test_the_position_cannot_move_inside_a_stream() -> None:
    streams = RandomStreams(1)
    with streams.stream("a"), pytest.raises(AssertionError):
        streams.at(step=1, microbatch=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_streams_work_in_every_gradient_mode(mode: Callable[[], torch.no_grad]) -> None:
    streams = RandomStreams(1)
    expected = draw(streams, "a")
    streams.at(step=0, microbatch=0)
    with mode():
        assert torch.equal(draw(streams, "a"), expected)


def test_streams_work_under_fake_tensors_and_a_device_context() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    streams = RandomStreams(1)
    state = torch.get_rng_state()
    with FakeTensorMode():
        assert draw(streams, "a").shape == (3,)
    with torch.device("meta"):
        assert draw(streams, "a").is_meta
    assert torch.equal(torch.get_rng_state(), state)


class Noisy(nn.Module):
    """A block with a weight and dropout whose forward runs in a stream, inside or outside a checkpoint."""

    def __init__(self, streams: RandomStreams, name: str, where: str) -> None:
        super().__init__()
        self.streams, self.name, self.where = streams, name, where
        self.weight = nn.Parameter(torch.full((16, 16), 0.1, dtype=torch.float64))
        self.inner: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "outside":
            with self.streams.stream(self.name):
                return self.checkpointed(self.core, x)
        if self.where == "inside":
            return self.checkpointed(self.streamed, x)
        return self.streamed(x)

    def streamed(self, x: Tensor) -> Tensor:
        with self.streams.stream(self.name):
            return self.core(x)

    def core(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(x.sin() @ self.weight, 0.5)
        if self.inner is not None:
            x = self.inner(x)
        return nn.functional.dropout(x.cos(), 0.5)

    def checkpointed(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        out = checkpoint(function, x, use_reentrant=False)
        assert isinstance(out, Tensor)
        return out


def gradients(where: str, *, nested: bool, container: bool, manual: bool = False) -> list[Tensor]:
    """Two micro-batches forward, then both backward, in pipeline order; returns the losses and gradients."""
    torch.manual_seed(0)
    streams = RandomStreams(1)
    blocks = [Noisy(streams, f"block{i}", where) for i in range(2)]
    if nested:
        for block in blocks:
            block.inner = Noisy(streams, "inner", where)
    losses = []
    x = torch.linspace(0, 1, 64, dtype=torch.float64).view(4, 16).requires_grad_()
    for microbatch in range(2):
        streams.at(step=1, microbatch=microbatch)

        def step() -> Tensor:
            loss = blocks[1](blocks[0](x)).square().sum()
            if manual:
                loss.backward()
            return loss

        if container:
            with streams.stream("model"):
                losses.append(step())
        else:
            losses.append(step())
            losses[-1].backward()
    if container and not manual:
        for loss in losses:
            loss.backward()
    assert x.grad is not None
    grads = [p.grad for block in blocks for p in block.parameters() if p.grad is not None]
    return [*(loss.detach() for loss in losses), x.grad, *grads]


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("container", [False, True])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_recomputation_sees_the_same_stream(where: str, container: bool, manual: bool) -> None:
    manual = manual and container
    expected = gradients("none", nested=False, container=container, manual=manual)
    got = gradients(where, nested=False, container=container, manual=manual)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_nested_streams_and_nested_checkpoints_outside() -> None:
    expected = gradients("none", nested=True, container=True)
    got = gradients("outside", nested=True, container=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_a_module_called_twice_in_a_checkpointed_stream_is_counted_from_its_beginning() -> None:
    streams = RandomStreams(1)
    outer, plain = Noisy(streams, "outer", "inside"), Noisy(streams, "outer", "none")
    inner = Noisy(streams, "inner", "none")
    outer.inner = plain.inner = nn.Sequential(inner, inner)
    plain.weight = outer.weight
    x = torch.ones(2, 16, dtype=torch.float64, requires_grad=True)
    grads = []
    for module in (outer, plain):
        streams.at(step=0, microbatch=0)
        with streams.stream("model"):
            loss = module(x).sum()
        grads.append(torch.autograd.grad(loss, [x, *module.parameters()]))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_ambiguous_recomputation_is_an_error_not_a_wrong_gradient() -> None:
    streams = RandomStreams(1)
    block = Noisy(streams, "shared", "inside")
    x = torch.ones(2, 16, dtype=torch.float64, requires_grad=True)
    with streams.stream("model"):
        loss = block(block(x)).sum()
    with pytest.raises(ModuleError, match="'shared' draws random numbers, was called more than once"):
        loss.backward()


def test_default_generators_are_torchs_own() -> None:
    assert default_generators([torch.device("cpu"), torch.device("meta")]) == (torch.default_generator,)


def test_seeded_lends_any_generator() -> None:
    generator = torch.Generator().manual_seed(3)
    expected = torch.rand(2, generator=torch.Generator().manual_seed(3))
    with seeded([generator], 9):
        assert torch.equal(
            torch.rand(1, generator=generator), torch.rand(1, generator=torch.Generator().manual_seed(9))
        )
    assert torch.equal(torch.rand(2, generator=generator), expected)


def test_a_stream_costs_tens_of_microseconds_at_most() -> None:
    streams = RandomStreams(1)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(200):
            with streams.stream("model.layers.3"):
                pass
        best = min(best, (time.perf_counter() - start) / 200)
    assert best < 100e-6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_accelerator_generator_is_lent_and_put_back() -> None:
    device = torch.device("cuda", 0)
    streams = RandomStreams(1, [device])
    torch.cuda.manual_seed(5)
    expected = torch.rand(3, device=device)
    torch.cuda.manual_seed(5)
    with streams.stream("a"):
        first = torch.rand(3, device=device)
    assert torch.equal(torch.rand(3, device=device), expected)
    streams.at(step=0, microbatch=0)
    with streams.stream("a"):
        assert torch.equal(torch.rand(3, device=device), first)
