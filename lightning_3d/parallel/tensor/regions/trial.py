"""A part of the model on small random values, in this process: what planning learns about code that it cannot trace.

Code whose way depends on values (an expert for each token) cannot run on fake tensors. Here it runs for real, with
weights and inputs made smaller by one factor where the code allows it, so that a layer of gigabytes takes milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from lightning_3d.graph.repeats import Attributes

# Shorter dims stay: counts of experts, of choices, of heads.
_SHORT = 16
_FEW = 12
_LEAST = 8
# Kernels of grouped products ask for 16 bytes, of fp32 here.
_KERNEL = 4
# Weights that are tried at their full size where the code allows no other.
_MOST_BYTES = 2**31
_MOST_TRIALS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSample:
    """How a module is called. Of tensors only shapes and dtypes are read, so they may be fake.

    Attributes:
        args: Arguments.
        kwargs: Keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class NoTrial(Exception):  # noqa: N818 (no error: the module stays as it is)
    """A module cannot be tried out. Its text says why."""


@dataclass(frozen=True, slots=True)
class Run:
    """One call of the module.

    Attributes:
        outputs: Leaves of what it returned.
        inputs: Leaves that gradients are taken of.
        weights: Its weights.
    """

    outputs: list[Any]
    inputs: list[Tensor]
    weights: Mapping[str, Tensor]

    def gradients(self, shares: Sequence[float]) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Returns the gradients of inputs and weights, for one random linear loss of the outputs.

        Args:
            shares: How much each output counts.

        Raises:
            NoTrial: There are none.
        """
        loss: Any = 0.0
        for index, (output, share) in enumerate(zip(self.outputs, shares, strict=True)):
            if isinstance(output, Tensor) and output.requires_grad:
                loss = loss + share * (output * _random(output.shape, index).to(output.dtype)).sum()
        leaves = [*self.inputs, *self.weights.values()]
        if not isinstance(loss, Tensor):
            raise NoTrial("no gradient leaves it")
        found = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        inputs = len(self.inputs)
        return list(found[:inputs]), dict(zip(self.weights, found[inputs:], strict=True))


class Trial:
    """A module with random weights and inputs, which runs as often as it is asked, always on the same values.

    It runs without dropout, since parts of a layer do not draw the numbers of the whole.

    Args:
        module: The module, on any device, fake and meta ones too; it is left as it is.
        sample: How it is called.
        scale: How its dims are made smaller.
        dtype: What it computes in.
        choices: Integers of the inputs are below it.

    Attributes:
        weights: Random weights by name, each tied one once.
    """

    def __init__(self, module: nn.Module, sample: CallSample, scale: Scale, dtype: torch.dtype, choices: int) -> None:
        self._module = module
        self.weights = {
            name: _random(scale.of(value.shape), index).to(dtype) / math.sqrt(max(scale.of(value.shape[-1:]) or (1,)))
            for index, (name, value) in enumerate(module.named_parameters())
        }
        self._places = {name: _places(module, value) for name, value in module.named_parameters()}
        self._buffers = [
            (child._buffers, key, _buffer(value, scale, dtype))
            for child in module.modules()
            for key, value in child._buffers.items()
            if value is not None
        ]
        leaves, self._structure = pytree.tree_flatten((sample.args, dict(sample.kwargs)))
        self._leaves = [_like(leaf, scale, dtype, choices, index) for index, leaf in enumerate(leaves)]

    def run(self, weights: Mapping[str, Tensor] | None = None, *, training: bool = True) -> Run:
        """Calls the module.

        Args:
            weights: In place of its own, by name; of any shape.
            training: In which mode.

        Raises:
            NoTrial: It fails, writes to its inputs, or gives gradients to more than what it returns.
        """
        own = {name: value.detach().requires_grad_() for name, value in (weights or self.weights).items()}
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        inputs = [leaf.requires_grad_() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        # Copies, since a leaf could not be written to.
        given = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(given, self._structure)
        held = [(registry, key, value) for name, value in own.items() for registry, key in self._places[name]]
        with torch.random.fork_rng(devices=[]), _in_mode(self._module, training), holding([*held, *self._buffers]):
            attributes = Attributes(self._module)
            output = self._called(args, kwargs)
            _refuse_ways_out(attributes)
        if any(leaf._version for leaf in given if isinstance(leaf, Tensor)):
            raise NoTrial("it writes to its inputs")
        return Run(pytree.tree_leaves(output), inputs, own)

    def _called(self, args: Any, kwargs: Any) -> Any:
        # Never torch.manual_seed: it seeds the generators of accelerators too, which nobody puts back.
        torch.default_generator.manual_seed(0)
        try:
            with _NoDropout(), torch.enable_grad():
                return self._module(*args, **kwargs)
        except Exception as failure:
            raise NoTrial(str(failure).strip().split("\n", 1)[0]) from failure


def _refuse_ways_out(attributes: Attributes) -> None:
    """Gradients may come to what a module returns, and not past it: there they would be a part on each rank."""
    left = attributes.left()
    if left is None:
        raise NoTrial("it fills a list or dict of tensors that the step may read")
    for (path, name), value in left.items():
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(value)):
            place = f"{path}.{name}" if path else name
            raise NoTrial(
                f"it leaves a tensor with a gradient in its attribute {place!r}, which it would have to return"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How dims are made smaller.

    Attributes:
        factor: What lengths of the weights are divided by.
        lengths: Which lengths are.
        others: Lengths of the inputs alone, and what they become.
    """

    factor: int = 1
    lengths: frozenset[int] = frozenset()
    others: Mapping[int, int] = field(default_factory=dict)

    def of(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the smaller shape."""
        return tuple(
            length // self.factor if length in self.lengths else self.others.get(length, length) for length in shape
        )


def trials(module: nn.Module, sample: CallSample, degree: int) -> Iterator[Trial]:
    """Yields up to two trials in which the module runs, the smaller first, in fp64 if its operations know that.

    The second is for operations that ask for parts of a certain size, and is needed only if parts do not run.

    Args:
        module: The module.
        sample: How it is called.
        degree: Number of ranks that its dims will be cut over; smaller dims are cut as well as the full ones.

    Raises:
        NoTrial: It runs in none.
    """
    experts = _experts(module)
    tight, roomy = (_smaller(module, sample, degree * multiple, experts) for multiple in (1, _KERNEL))
    failures: list[str] = []
    scales: list[Scale] = []
    found = 0
    for scale in (tight, roomy, Scale(others=tight.others), Scale()):
        trial = None if scale in scales else _running(module, sample, scale, experts, failures)
        scales.append(scale)
        if trial is not None:
            yield trial
            found += 1
            if found == _MOST_TRIALS:
                return
    if not found:
        raise NoTrial(f"it does not run on random values ({'; '.join(dict.fromkeys((failures[0], failures[-1])))})")


def _running(module: nn.Module, sample: CallSample, scale: Scale, experts: int, failures: list[str]) -> Trial | None:
    """A trial of one scale in which the module runs; why others do not is added to the failures."""
    for dtype in (torch.float64, torch.float32):
        size = sum(math.prod(scale.of(value.shape)) for value in module.parameters()) * dtype.itemsize
        if size > _MOST_BYTES:
            failures.append(f"{size / 2**30:.0f} GiB of weights are too much to try it out")
            continue
        for choices in dict.fromkeys((min(experts, _LEAST), 2)):
            trial = Trial(module, sample, scale, dtype, choices)
            try:
                trial.run()
            except NoTrial as failure:
                failures.append(str(failure))
            else:
                return trial
    return None


# ---- sizes ----


def _experts(module: nn.Module) -> int:
    """How many parts the inputs may choose between, as far as the module's form shows it."""
    stacked = [value.shape[0] for value in module.parameters() if value.dim() > 2]
    listed = [len(child) for child in module.modules() if isinstance(child, nn.ModuleList)]
    return max([*stacked, *listed], default=2)


def _smaller(module: nn.Module, sample: CallSample, parts: int, experts: int) -> Scale:
    """How to make dims smaller that can still be cut in as many parts."""
    lengths = frozenset(
        length for value in module.parameters() for length in value.shape if length > _SHORT and length != experts
    )
    factor = _factor(lengths, lambda length, less: _cut_alike(length, less, parts))
    tensors = [leaf for leaf in pytree.tree_leaves((sample.args, dict(sample.kwargs))) if isinstance(leaf, Tensor)]
    free = {length for leaf in tensors for length in leaf.shape if length > _SHORT} - lengths - {experts}
    if len(free) == 1:
        return Scale(factor=factor, lengths=lengths, others={free.pop(): _FEW})
    less = _factor(free, lambda length, shorter: shorter >= _LEAST)
    return Scale(factor=factor, lengths=lengths, others={length: length // less for length in free})


def _factor(lengths: frozenset[int] | set[int], allowed: Callable[[int, int], bool]) -> int:
    """The largest common divisor that leaves of each length what is allowed."""
    common = math.gcd(*lengths) if lengths else 1
    return next(
        factor
        for factor in range(common, 0, -1)
        if common % factor == 0 and all(factor == 1 or allowed(length, length // factor) for length in lengths)
    )


def _cut_alike(length: int, less: int, parts: int) -> bool:
    """Whether a smaller length can be cut in equal parts if the full one can."""
    return less >= _LEAST and (less % parts == 0 or length % parts != 0)


# ---- values ----


@contextmanager
def holding(values: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Context in which modules hold other parameters or buffers.

    Args:
        values: Registry of a module, name in it, and what to hold there; no place twice.
    """
    before = [(registry, name, registry[name]) for registry, name, _ in values]
    _put(values)
    try:
        yield
    finally:
        _put(before)


def _put(values: Sequence[tuple[dict[str, Any], str, Any]]) -> None:
    for registry, name, value in values:
        registry[name] = value


def _places(module: nn.Module, parameter: nn.Parameter) -> list[tuple[dict[str, Any], str]]:
    """Where a parameter is registered; more than once if it is tied."""
    return [
        (child._parameters, key)
        for child in module.modules()
        for key, value in child._parameters.items()
        if value is parameter
    ]


def _buffer(value: Tensor, scale: Scale, dtype: torch.dtype) -> Tensor:
    shape = scale.of(value.shape)
    if value.is_floating_point():
        return _random(shape, 0).to(dtype)
    return torch.zeros(shape, dtype=value.dtype) if value.is_meta else value


def _random(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _like(leaf: Any, scale: Scale, dtype: torch.dtype, choices: int, seed: int) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    shape = scale.of(leaf.shape)
    if leaf.is_floating_point():
        return _random(shape, seed).to(dtype)
    below = 2 if leaf.dtype is torch.bool else choices
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed)).to(leaf.dtype)


class _NoDropout(TorchFunctionMode):
    """Context in which dropout keeps everything."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout):
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


@contextmanager
def _in_mode(module: nn.Module, training: bool) -> Iterator[None]:
    """Context in which every part of a module trains, or none does."""
    before = [(child, child.training) for child in module.modules()]
    module.train(training)
    try:
        yield
    finally:
        for child, mode in before:
            child.training = mode
