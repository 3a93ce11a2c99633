"""What an operation of torch does to the elements of a tensor, so that it is known where their order counts."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._ops import OpOverload

# each: every element by itself; lists: the same for the tensors of lists; draws: random numbers for every element;
# reduces: one number of all; compares: whether two are equal; views: a window on the same memory.
Kind = Literal["each", "lists", "draws", "reduces", "compares", "views", "other"]

# torch calls them no pointwise operations, and they are.
_EACH = frozenset(
    {
        *("detach", "alias", "_to_copy", "fill", "fill_", "copy", "copy_", "zero", "zero_", "masked_fill"),
        *("masked_fill_", "empty_like", "zeros_like", "ones_like", "full_like"),
    }
)
_FUSED = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})
_DRAWS = frozenset(
    {
        *("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_"),
        *("rand_like", "randn_like", "randint_like"),
    }
)
# Those to which zeros in the end make no difference.
_SUMS = frozenset({"sum", "norm", "linalg_vector_norm", "count_nonzero", "any", "_foreach_norm"})
_REDUCES = _SUMS | {
    *("mean", "max", "min", "prod", "all", "amax", "amin", "var", "std"),
    *("_foreach_max", "_foreach_powsum"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One overload of an operation.

    Attributes:
        name: What users call it.
        kind: What it does; a reduction may still have dims.
        written: Positions and names of the arguments that it writes to.
        sums: Whether zeros in addition make no difference to it.
        dims: Position of the argument that names dims; None if there is none.
    """

    name: str
    kind: Kind
    written: tuple[tuple[int, str], ...]
    sums: bool
    dims: int | None

    @property
    def writes(self) -> bool:
        """Whether it writes to its first argument."""
        return bool(self.written) and self.written[0][0] == 0

    @property
    def writes_several(self) -> bool:
        """Whether it writes to more than one argument."""
        return len(self.written) > 1

    def targets(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
        """Returns what a call writes to: tensors, or lists of them."""
        return (args[index] if index < len(args) else kwargs.get(name) for index, name in self.written)

    def reduces_all(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is the reduction of all elements to one number."""
        if self.kind != "reduces":
            return False
        if self.dims is None:
            return True
        return not (args[self.dims] if len(args) > self.dims else kwargs.get("dim"))


@functools.cache
def operation(function: OpOverload) -> Operation:
    """Returns what is known of an operation."""
    schema = function._schema
    name = function.overloadpacket.__name__
    arguments = [*enumerate(schema.arguments)]
    names = [argument.name for _, argument in arguments]
    return Operation(
        name=name,
        kind=_kind(function, name),
        written=tuple((i, each.name) for i, each in arguments if each.alias_info and each.alias_info.is_write),
        sums=name in _SUMS,
        dims=names.index("dim") if "dim" in names else None,
    )


def _kind(function: OpOverload, name: str) -> Kind:
    if name in _DRAWS:
        return "draws"
    if name == "equal":
        return "compares"
    if name in _REDUCES and not _is_pointwise(function):
        return "reduces"
    if name in _FUSED or name.startswith("_foreach_"):
        return "lists"
    if name in _EACH or _is_pointwise(function):
        return "each"
    return "views" if function.is_view else "other"


def _is_pointwise(function: OpOverload) -> bool:
    """Whether torch says so of an operation that gives one tensor."""
    tags = function.tags
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags or torch.Tag.out in tags:
        return False
    returns = function._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"
