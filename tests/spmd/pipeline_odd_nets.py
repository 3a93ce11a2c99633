"""Nets whose backwards are hard to split in halves, or that send unusual things between stages."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.spmd.pipeline_nets import WIDTH, Net


class Parameters(nn.Module):
    """A block with a few parameters that its net uses itself."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.ParameterList(torch.randn(shape) for shape in shapes)


class OddNet(Net):
    """One hidden state between stages whose blocks have ``shapes`` of parameters beside a linear layer."""

    shapes: tuple[tuple[int, ...], ...] = ()

    def block(self, index: int, stages: int) -> nn.Module:
        return Parameters(*self.shapes)

    def run(self, stage: int, received: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        (h,) = received or (x,)
        block: Any = self.stages[stage]
        return (self.hidden(h, block),)

    def hidden(self, h: Tensor, block: Any) -> Tensor:
        return h + torch.tanh(block.linear(h))


class SharedGradient(OddNet):
    """Autograd gives both parameters one tensor."""

    shapes = ((WIDTH,), (WIDTH,))

    def hidden(self, h: Tensor, block: Any) -> Tensor:
        return super().hidden(h, block) * (block.extra[0] + block.extra[1])


class ReceivedGradient(OddNet):
    """The gradient of a parameter is the tensor in which the stage's gradient was received."""

    shapes = ((2, 3, WIDTH),)

    def hidden(self, h: Tensor, block: Any) -> Tensor:
        return super().hidden(h, block) + block.extra[0]


class ExpandedGradients(OddNet):
    """The last stage's gradients are single numbers, of a parameter and of what it receives."""

    shapes = ((WIDTH,),)

    def output(self, sent: tuple[Tensor, ...], x: Tensor) -> dict[str, Tensor]:
        last: Any = self.stages[-1]
        return {"loss": sent[0].sum() + last.extra[0].sum(), "prediction": sent[0]}

    def hidden(self, h: Tensor, block: Any) -> Tensor:
        return h + block.linear.bias.sum() if block is self.stages[-1] else super().hidden(h, block)


class Views(OddNet):
    """Stages send views."""

    def hidden(self, h: Tensor, block: Any) -> Tensor:
        return super().hidden(h, block).transpose(0, 1).contiguous().transpose(0, 1)


class Unused(OddNet):
    """Every stage has a parameter that nothing uses."""

    shapes = ((2,),)


class Tied(OddNet):
    """A weight is used twice in a stage."""

    def hidden(self, h: Tensor, block: Any) -> Tensor:
        weight = block.linear.weight.exp()
        return h + torch.tanh(block.linear(h) @ weight) @ weight.t()


class Recomputed(OddNet):
    def hidden(self, h: Tensor, block: Any) -> Tensor:
        return h + checkpoint(lambda value: torch.tanh(block.linear(value)), h, use_reentrant=False)


class Reentrant(OddNet):
    def hidden(self, h: Tensor, block: Any) -> Tensor:
        # Gradients come out of such a checkpoint only by what went in.
        if block is self.stages[0]:
            return super().hidden(h, block)
        return h + checkpoint(lambda value: torch.tanh(block.linear(value)), h, use_reentrant=True)


class Cut(OddNet):
    """No gradient goes from a stage to the one before, though the states say that they need one."""

    zeros_for_none = True

    def hidden(self, h: Tensor, block: Any) -> Tensor:
        return super().hidden(h.detach(), block)


class Frozen(OddNet):
    """Only the last stage trains."""

    def __init__(self, stages: int) -> None:
        super().__init__(stages)
        self.stages[:-1].requires_grad_(False)


class Hooked(OddNet):
    """Every gradient is halved by a hook of its parameter."""

    def __init__(self, stages: int) -> None:
        super().__init__(stages)
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(_halve)


class HookedInside(OddNet):
    """Every gradient of the second stage is halved by a hook, and no other."""

    def __init__(self, stages: int) -> None:
        super().__init__(stages)
        for parameter in self.stages[1].parameters():
            parameter.register_post_accumulate_grad_hook(_halve)


class OtherLeaf(OddNet):
    """A tensor that is no parameter gets a gradient; it is a part of what a step of its own would train."""

    def __init__(self, stages: int) -> None:
        super().__init__(stages)
        self.scale = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)

    def hidden(self, h: Tensor, block: Any) -> Tensor:
        return super().hidden(h, block) * self.scale


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


class OwnFunction(OddNet):
    def hidden(self, h: Tensor, block: Any) -> Tensor:
        return Halved.apply(super().hidden(h, block))


class Sleep(torch.autograd.Function):
    """Takes as long as a step of a schedule in forward, and twice in backward."""

    SECONDS = 0.04

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(Sleep.SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * Sleep.SECONDS)
        return gradient


class Slow(OddNet):
    """All stages take the same time, however busy the machine is."""

    def hidden(self, h: Tensor, block: Any) -> Tensor:
        return Sleep.apply(super().hidden(h, block))


class Skips(Net):
    """Two states and indices go between stages; the first state on to the last one."""

    def run(self, stage: int, received: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        if not received:
            h = x + self.stages[0](x)
            return h, h.mean(0), torch.arange(x.shape[1])
        h, first, index = received
        return h + self.stages[stage](h) + first[index.flip(0)], first, index + 1 - 1


class SometimesSkips(Skips):
    """Sends a second state for long sequences alone."""

    def run(self, stage: int, received: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        if x.shape[1] > 3:
            return super().run(stage, received, x)
        (h,) = received or (x,)
        return (h + self.stages[stage](h),)


class RandomNet(OddNet):
    """Every block is a random program over the state, its weights and what it has computed from both."""

    seed = 0

    def block(self, index: int, stages: int) -> nn.Module:
        return Parameters(*[(WIDTH, WIDTH)] * 6, *[(WIDTH,)] * 6)

    def hidden(self, h: Tensor, block: Any) -> Tensor:
        index = next(index for index, own in enumerate(self.stages) if own is block)
        # The same program in every run of a block.
        chosen = random.Random(self.seed * 100 + index)
        often = chosen.random() < 0.5
        states, weights, biases = [h], [*block.extra[:6]], [*block.extra[6:]]

        def taken(values: list[Tensor]) -> Tensor:
            # Some programs use what they have taken again.
            index = chosen.randrange(len(values))
            keep = len(values) == 1 or (often and chosen.random() < 0.5)
            return values[index] if keep else values.pop(index)

        for _ in range(7):
            kind, state = chosen.randrange(6), chosen.choice(states)
            if kind == 0:
                weights.append(torch.sin(taken(weights)) @ taken(weights))
            elif kind == 1:
                states.append(torch.tanh(state @ taken(weights) + taken(biases)))
            elif kind == 2:
                states.append(state * chosen.choice(states) + taken(weights).sum())
            elif kind == 3:
                biases.append(taken(biases) + taken(biases))
            elif kind == 4:
                bias = taken(biases)
                biases.append(bias * bias)
            else:
                states.append(torch.sigmoid(state) * (taken(biases) + taken(biases)))
        return h + torch.tanh(sum(states[1:], states[0]))


def random_net(seed: int) -> type[RandomNet]:
    return type("RandomNet", (RandomNet,), {"seed": seed})


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)
