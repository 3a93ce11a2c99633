"""What a recorded step is: its calls in order, and the hidden values that are alive between its blocks.

Positions in a step are counted in blocks: position k is what happens after k blocks have begun. Position 0 lies before
the first block, position k from the call of block k - 1 up to that of block k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils._pytree import TreeSpec

from lightning_3d.shards.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Who made a hidden value.

    Attributes:
        kind: A "module" whose calls are watched, a "hook"ed module inside one, or a "function" in a container.
        maker: Name of the module, or of the function.
        call: Number of the maker's call in the step; for functions the number among all container functions that are
            counted.
        output: Index among the flat outputs.
    """

    kind: Literal["module", "hook", "function"]
    maker: str
    call: int = 0
    output: int = 0

    def __str__(self) -> str:
        times = f", call {self.call}" if self.call and self.kind != "function" else ""
        return f"output {self.output} of {self.maker}{times}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A hidden value that goes from one stage to the next.

    Attributes:
        origin: Who made it.
        shape: Its global shape.
        dtype: Its dtype.
        requires_grad: Whether gradients come back for it.
        layout: How it is cut over the tensor axis; None if it is whole on every tensor rank.
        tensor_ranks: Parts of the cut.
    """

    origin: Origin
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    layout: Layout | None = None
    tensor_ranks: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes that a rank sends."""
        return math.prod(self.shape) * self.dtype.itemsize // (1 if self.layout is None else self.tensor_ranks)

    def __str__(self) -> str:
        return f"{self.origin} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True, slots=True)
class HiddenLeaf:
    """A tensor in an output that another rank may have to stand in for.

    Attributes:
        shape: Its global shape.
        dtype: Its dtype.
        requires_grad: Whether it needs a gradient.
        same_as: Index of the same tensor in the flat output of the call, if it stands there: earlier in it, or for
            what is returned inside, anywhere. That one is noted as hidden, with the call as its origin.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    same_as: int | None = None


@dataclass(frozen=True, slots=True)
class ArgumentLeaf:
    """An output that is one of the flat arguments, the object itself."""

    index: int


@dataclass(frozen=True, slots=True)
class ConstantLeaf:
    """An output that is no tensor and does not change."""

    value: Any


Leaf = HiddenLeaf | ArgumentLeaf | ConstantLeaf


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """The output of a call without its values.

    Attributes:
        leaves: Its flat parts.
        spec: How they are put together.
    """

    leaves: tuple[Leaf, ...]
    spec: TreeSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRecord:
    """One call of a watched module at the level of its containers.

    Attributes:
        module: Its name.
        call: How often it was called before in this step.
        position: Blocks that had begun, itself not counted.
        output: What it returned.
        inside: What modules inside it returned whose forward hooks are the user's, in the order of their calls: name,
            number of the call, and output.
    """

    module: str
    call: int
    position: int
    output: Structure
    inside: tuple[tuple[str, int, Structure], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """What one step did with one kind of input.

    Attributes:
        blocks: Names of the blocks in the order of their calls.
        calls: Calls of watched modules, in order.
        boundaries: For each block the values that were made before it and are used from it on; those of the first are
            never sent.
        parameters: Positions at which each parameter is used, by first names.
        modules: Positions at which each watched module is called.
        flops: Floating point operations of the forward pass at each position, one more than there are blocks.
        named: Names of the blocks, to look them up.
        of_call: The calls by module and number.
    """

    blocks: tuple[str, ...]
    calls: tuple[CallRecord, ...]
    boundaries: tuple[tuple[Value, ...], ...]
    parameters: Mapping[str, frozenset[int]]
    modules: Mapping[str, frozenset[int]]
    flops: tuple[float, ...] = field(default=())
    named: frozenset[str] = field(init=False, repr=False, compare=False)
    of_call: Mapping[tuple[str, int], CallRecord] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "named", frozenset(self.blocks))
        object.__setattr__(self, "of_call", {(call.module, call.call): call for call in self.calls})
