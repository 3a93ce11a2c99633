"""Operations that treat each element alone: on parts as on the whole."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.rules.entering import cut, entered
from lightning_3d.shards.rules.table import Function, RuleTable, spellings
from lightning_3d.shards.tensor import ShardTensor

table = RuleTable()

# Of one tensor; whatever else they take are numbers, types and devices.
_OF_ONE = (
    "abs absolute acos acosh airy_ai angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh "
    "bessel_j0 bessel_j1 bfloat16 bitwise_not bool byte cdouble ceil celu cfloat chalf char clone conj conj_physical "
    "cos cosh cpu cuda deg2rad detach digamma double elu empty_like entr erf erfc erfcx erfinv exp exp2 expit expm1 "
    "fix float floor frac gammaln gelu half hardshrink hardsigmoid hardswish hardtanh i0 i0e i1 i1e imag int isfinite "
    "isinf isnan isneginf isposinf isreal leaky_relu lgamma log log10 log1p log2 log_ndtr logical_not logit logsigmoid "
    "long mish mvlgamma nan_to_num ndtr ndtri neg negative ones_like positive psi rad2deg real reciprocal relu relu6 "
    "resolve_conj resolve_neg round rsqrt selu sgn short sigmoid sign signbit silu sin sinc sinh softplus softshrink "
    "softsign sqrt square tan tanh tanhshrink threshold trunc zero zeros_like"
)
# Of tensors that broadcast.
_OF_SEVERAL = (
    "add addcdiv addcmul arctan2 atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor clamp "
    "clamp_max clamp_min clip complex copy copysign div divide eq fill float_power floor_divide fmax fmin fmod "
    "full_like gammainc gammaincc gcd ge greater greater_equal gt heaviside hypot igamma igammac isclose lcm ldexp le "
    "lerp less less_equal logaddexp logaddexp2 logical_and logical_or logical_xor lt masked_fill maximum minimum mul "
    "multiply ne nextafter not_equal polar pow remainder rsub sub subtract true_divide xlog1py xlogy zeta"
)
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor", "lshift", "rshift")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def own_operand(value: Any, beside: ShardTensor) -> Any:
    """Returns what a rank needs of an operand that broadcasts with a shard.

    Args:
        value: Any argument of the operation; what is no tensor stays as it is.
        beside: The shard.

    Raises:
        Unshardable: It is a shard that is cut in another way.
    """
    if not isinstance(value, Tensor):
        return value
    local = beside._local
    from_end = local.dim() - beside._dim
    if isinstance(value, ShardTensor):
        if value._local.dim() - value._dim != from_end or value._segments != beside._segments:
            raise Unshardable(f"its operands are cut differently: {beside.cut} and {value.cut}")
        return value._local
    dim = value.dim() - from_end
    if dim < 0 or value.size(dim) == 1:
        return entered(value, beside._group)
    if value.size(dim) != beside.size(beside._dim):
        raise Unshardable("its operands do not broadcast")
    return cut(value, beside._group, dim, beside._segments)


def _of_one(function: Function) -> Function:
    def rule(x: ShardTensor, *args: Any, **kwargs: Any) -> ShardTensor:
        return x.like(function(x._local, *args, **kwargs), x._dim, x._segments)

    return rule


def _of_several(function: Function) -> Function:
    def rule(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if isinstance(args[0], ShardTensor) else _first_shard((*args, *kwargs.values()))
        own = [each._local if each is first else own_operand(each, first) for each in args]
        if kwargs:
            result = function(*own, **{name: own_operand(each, first) for name, each in kwargs.items()})
        else:
            result = function(*own)
        # A comparison with what is no tensor says that it cannot be made.
        if not isinstance(result, Tensor):
            return result
        dim = result.dim() - first._local.dim() + first._dim
        return first.like(result, dim, first._segments)

    return rule


def _first_shard(args: Iterable[Any]) -> ShardTensor:
    return next(each for each in args if isinstance(each, ShardTensor))


def _in_place(function: Function) -> Function:
    def rule(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, ShardTensor):
            raise Unshardable("a replicated tensor is written to")
        own = [own_operand(each, x) for each in args]
        function(x._local, *own, **{name: own_operand(each, x) for name, each in kwargs.items()})
        return x

    return rule


def _reflected(rule: Function) -> Function:
    def reflected(right: Any, left: Any) -> Any:
        return rule(left, right)

    return reflected


def _everywhere(name: str) -> tuple[Function, ...]:
    special = getattr(torch.special, name, None)
    return tuple(dict.fromkeys(spellings(name) if special is None else (*spellings(name), special)))


def _write_down_functions() -> None:
    for names, kind in ((_OF_ONE, _of_one), (_OF_SEVERAL, _of_several)):
        for name in names.split():
            for function in _everywhere(name):
                table.add(function, kind(function))
            for function in _everywhere(f"{name}_"):
                table.add(function, _in_place(function))


def _write_down_operators() -> None:
    for name in _OPERATORS:
        method, rule = name.strip("_"), _of_several(getattr(operator, name))
        table.add(getattr(Tensor, f"__{method}__"), rule)
        table.add(getattr(Tensor, f"__r{method}__"), _reflected(rule))
        table.add(getattr(Tensor, f"__i{method}__"), _in_place(getattr(operator, f"i{method}")))
    for name in _COMPARISONS:
        table.add(getattr(Tensor, f"__{name}__"), _of_several(getattr(operator, name)))
    # The other operators of one tensor are their functions.
    table.add(Tensor.__invert__, _of_one(operator.invert))


_write_down_functions()
_write_down_operators()
_where = _of_several(torch.where)
table.add(Tensor.where, _of_several(Tensor.where))


@table.rule(torch.where)
def where(*args: Any, **named: Any) -> Any:
    """Takes elements of two tensors; the form of one argument looks for positions."""
    if "condition" in named:
        args = (named.pop("condition"), *args)
    if len(args) + len(named) < 3:
        raise Unshardable("it asks for positions in the whole")
    return _where(*args, **named)


@table.rule(Tensor.to)
def to(x: Any, *args: Any, **kwargs: Any) -> Any:
    """Changes type or device, also to those of a shard."""
    args = tuple(each._local if isinstance(each, ShardTensor) else each for each in args)
    if isinstance(kwargs.get("other"), ShardTensor):
        kwargs["other"] = kwargs["other"]._local
    if not isinstance(x, ShardTensor):
        return x.to(*args, **kwargs)
    local = x._local.to(*args, **kwargs)
    return x if local is x._local else x.like(local, x._dim, x._segments)


@table.rule(Tensor.type_as)
def type_as(x: Any, other: Any) -> Any:
    """Changes to the type of another tensor."""
    return to(x, device=other.device, dtype=other.dtype)


@table.rule(Tensor.type)
def of_type(x: ShardTensor, *args: Any, **kwargs: Any) -> Any:
    """Changes type, or names it."""
    local: Any = x._local.type(*args, **kwargs)
    return x.like(local, x._dim, x._segments) if isinstance(local, Tensor) else local


@table.rule(*spellings("prelu"))
def prelu(x: Any, weight: Any) -> Any:
    """Scales negative elements: by one number, or by one for each channel (dim 1)."""
    if not isinstance(x, ShardTensor):
        raise Unshardable("the weight is cut and the input is not")
    if x._dim != 1 or weight.numel() == 1:
        own = entered(weight, x._group)
    elif not isinstance(weight, ShardTensor):
        own = cut(weight, x._group, 0, x._segments)
    elif weight._segments == x._segments:
        own = weight._local
    else:
        raise Unshardable("its weight is cut differently")
    return x.like(F.prelu(x._local, own), x._dim, x._segments)
