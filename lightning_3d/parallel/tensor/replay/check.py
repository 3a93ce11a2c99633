"""Running a program beside the block it stands for, on the same input, and comparing every bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.parallel.tensor.replay.bits import same_bits
from lightning_3d.parallel.tensor.replay.caches import is_cache, noted_updates
from lightning_3d.parallel.tensor.replay.modes import PlainCalls
from lightning_3d.parallel.tensor.replay.program import Program
from lightning_3d.parallel.tensor.replay.results import take_apart
from lightning_3d.parallel.tensor.replay.writer import Constants
from lightning_3d.random.streams import default_generators
from lightning_3d.shards.group import ShardGroup


def check(program: Program, inputs: tuple[Any, ...], block: Callable[[], Any]) -> tuple[Any, str | None]:
    """Runs the block, then the program; the run of the program leaves no trace.

    The program is answered with what the ranks exchanged in the run of the block. So ranks need not agree on when to
    check, and a rank that checks alone waits for nobody.

    Args:
        program: Stands for the block.
        inputs: Plain tensors and caches of the arguments.
        block: Runs the block as it is.

    Returns:
        The block's result, and how the program differs, or None.
    """
    operands = list(program.operands(inputs))
    caches = [operand for operand in operands if not isinstance(operand, Tensor)]
    generators = default_generators({operand.device for operand in operands if isinstance(operand, Tensor)})
    before = [generator.get_state() for generator in generators]
    for index in program.changed:
        operands[index] = operands[index].clone()
    exchange = _Exchange(generators)
    with noted_updates(caches, _nothing), exchange:
        result = block()
    after = [generator.get_state() for generator in generators]
    exchange.answers = iter(exchange.calls)
    _set_states(generators, before)
    try:
        # A checkpoint around must not count what the program saves.
        with exchange, saved_tensors_hooks(_detached, _detached), torch.set_grad_enabled(torch.is_grad_enabled()):
            outputs = program.body.function(*operands)
        difference = _difference(program, operands, program.operands(inputs), outputs, result)
    except Exception as failure:
        difference = f"it fails: {failure}"
    finally:
        _set_states(generators, after)
    return result, difference


@dataclass(frozen=True, slots=True)
class _Call:
    """A node of the shards that ran in the block."""

    name: str
    tensors: tuple[Tensor, ...]
    result: Any
    states: tuple[Tensor, ...]


class _Exchange(PlainCalls):
    """Listens to what the nodes of a block exchange, and answers the same nodes of its program."""

    def __init__(self, generators: tuple[torch.Generator, ...]) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.answers: Iterator[_Call] | None = None
        self._generators = generators

    def plain(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        values = (*args, *kwargs.values())
        if not any(isinstance(value, ShardGroup) or is_cache(value) for value in values):
            return function(*args, **kwargs)
        tensors = tuple(value for value in values if isinstance(value, Tensor))
        if self.answers is not None:
            return self._answer(function.__name__, tensors)
        copies = tuple(map(_copy, tensors))
        result = function(*args, **kwargs)
        kept = tuple(map(_copy, result)) if isinstance(result, tuple) else _copy(result)
        states = tuple(generator.get_state() for generator in self._generators)
        self.calls.append(_Call(function.__name__, copies, kept, states))
        return result

    def _answer(self, name: str, tensors: tuple[Tensor, ...]) -> Any:
        assert self.answers is not None
        call = next(self.answers, None)
        if call is None or call.name != name or not _all_same(call.tensors, tensors):
            raise ValueError(f"{name} is given other values")
        _set_states(self._generators, call.states)
        return call.result


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _nothing(_: str) -> None:
    return None


def _detached(tensor: Tensor) -> Tensor:
    # An operation that saves its own result would keep it for good: Python does not see the cycle through autograd.
    return tensor.detach()


def _set_states(generators: tuple[torch.Generator, ...], states: Any) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _difference(program: Program, operands: list[Any], real: tuple[Any, ...], outputs: Any, result: Any) -> str | None:
    constants = Constants()
    results = take_apart(result, constants)
    if results.text != program.results_text or constants.values != program.results_constants:
        return "the block returns something else"
    tensors = (outputs,) if results.bare else outputs
    if not _all_same(results.tensors, tensors):
        return "the results differ"
    if not all(same_bits(operands[index], real[index]) for index in program.changed):
        return "what the block writes differs"
    return None


def _all_same(ones: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return len(ones) == len(others) and all(map(_same_tensors, ones, others))


def _same_tensors(one: Tensor, other: Tensor) -> bool:
    return one.requires_grad is other.requires_grad and same_bits(one, other)
