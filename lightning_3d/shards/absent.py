"""Parameters that other pipeline ranks hold: hooks for one device compute with them what needs no values.

What acts on elements does nothing here and is right where the values are; random numbers are drawn and thrown away, so
that generators stay as on one device. What would read a value is an error: another number on each rank would be wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from lightning.pytorch.utilities import grads
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn import init
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils import _pytree as pytree
from typing_extensions import Self, override

from lightning_3d.errors import ModuleError
from lightning_3d.shards.elementwise import Operation, operation
from lightning_3d.shards.writes import tensors_in

_META = torch.device("meta")
# What they give depends on values, its shape too; and what to call them.
_READS: Mapping[str, str] = {
    **dict.fromkeys(("_local_scalar_dense", "is_nonzero"), "to read a number"),
    **{name: name for name in ("equal", "allclose", "nonzero", "masked_select", "_unique2")},
}
# Of a size and with values that are given; a parameter only says on which device and of which type.
_FILLED = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"})
# How many numbers they draw depends on values.
_DRAWN_BY_VALUE = frozenset({"poisson", "binomial", "_standard_gamma", "_sample_dirichlet"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """Where the values of a parameter are.

    Attributes:
        name: The parameter's first name.
        ranks: The pipeline ranks that hold it.
        rank: This one, which does not.
    """

    name: str
    ranks: frozenset[int]
    rank: int

    def refusal(self, act: str) -> ModuleError:
        """Returns the error of what needs values.

        Args:
            act: What somebody does with the tensor.
        """
        return ModuleError(
            f"{act} needs values of parameter '{self.name}', of its gradient or of what was computed from them: it "
            f"{self}, and this is rank {self.rank}.",
            valid="what acts on each element alone, random draws, and whatever else nobody reads here",
            fix="to clip gradients, Trainer(gradient_clip_val=...) or self.clip_gradients(optimizer, "
            "gradient_clip_val=...), which take the norm of all ranks; for values, strategy.full_tensor("
            f"{self.name!r}, p or p.grad), on every rank",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __str__(self) -> str:
        ranks = sorted(self.ranks)
        return f"lies on pipeline rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Arrivals:
    """Whether gradients have come from a step; those of absent parameters are there as long as this rank's own.

    Attributes:
        number: How often some have come.
    """

    def __init__(self) -> None:
        self.number = 0
        self._here = False
        self._own: Sequence[Tensor] = ()

    def arrive(self, own: Sequence[Tensor]) -> None:
        """Called when a step has brought gradients.

        Args:
            own: The parameters that train on this rank.
        """
        self.number += 1
        self._here, self._own = True, own

    def clear(self) -> None:
        """Called when gradients go."""
        self._here = False

    @property
    def present(self) -> bool:
        """Whether gradients are there."""
        return self._here and not (self._own and all(parameter.grad is None for parameter in self._own))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Copies of parameters have no gradients.
        memo[id(self)] = copied = type(self)()
        return copied


class Absent(Tensor):
    """A tensor whose values are on other pipeline ranks: a parameter, its gradient, or what is computed from them.

    ``is_meta`` is true; ``device`` is where this rank would have it.

    Args:
        form: Any tensor of its shape, strides and dtype.
        elsewhere: Where the values are.
        device: Where it claims to be.
        arrivals: Of gradients, for a parameter.
    """

    __slots__ = ("_arrivals", "_dropped", "_elsewhere", "_gradient", "_is_param")
    _elsewhere: Elsewhere
    _arrivals: Arrivals | None
    # The number of an arrival and the gradient that came with it.
    _gradient: tuple[int, Absent] | None
    # The arrival whose gradient a user has set to None.
    _dropped: int | None
    # Tells torch that it is a parameter.
    _is_param: bool

    def __new__(
        cls, form: Tensor, elsewhere: Elsewhere, device: torch.device, arrivals: Arrivals | None = None
    ) -> Self:
        """Makes a tensor without memory."""
        return Tensor._make_wrapper_subclass(cls, form.shape, form.stride(), dtype=form.dtype, device=device)

    def __init__(
        self, form: Tensor, elsewhere: Elsewhere, device: torch.device, arrivals: Arrivals | None = None
    ) -> None:
        self._elsewhere, self._arrivals = elsewhere, arrivals
        self._gradient, self._dropped, self._is_param = None, None, arrivals is not None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        act, options = operation(func), {**(kwargs or {})}
        if act.name.startswith("_foreach_") or act.kind == "lists":
            return _lists(func, act, args, options)
        return _run(func, act, args, options)

    @property
    def is_meta(self) -> bool:  # type: ignore[override]
        """True: there is no memory."""
        _draw_as_initialisation(self, sys._getframe(1))
        return True

    @property
    def data(self) -> Tensor:
        """The same without history; what is set is not kept."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if has_torch_function_unary(self):
            own: Any = vars(Absent)["data"]
            handle_torch_function(own.__set__, (self,), self, value)
            return
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ModuleError(
                f"the data of '{self._elsewhere.name}' were set to a {value.dtype} tensor of shape "
                f"{tuple(value.shape)}; it is {self.dtype} of shape {tuple(self.shape)}.",
                fix="set data of the same shape and dtype",
            )

    @property
    def grad(self) -> Absent | None:
        """The gradient, absent too, while this rank's own parameters have theirs."""
        if has_torch_function_unary(self):
            found: Absent | None = handle_torch_function(Absent.grad.__get__, (self,), self)
            return found
        present = self._arrivals is not None and self.requires_grad and self._arrivals.present
        return self.gradient() if present else None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if has_torch_function_unary(self):
            own: Any = vars(Absent)["grad"]
            handle_torch_function(own.__set__, (self,), self, value)
            return
        self._dropped = None if value is not None or self._arrivals is None else self._arrivals.number

    def gradient(self) -> Absent | None:
        """Returns the gradient of a parameter whose holder has one; None if it was set to None here."""
        assert self._arrivals is not None, "it is a parameter"
        number = self._arrivals.number
        if number == self._dropped:
            return None
        if self._gradient is None or self._gradient[0] != number:
            self._gradient = number, Absent(self, self._elsewhere, self.device)
        return self._gradient[1]

    def tolist(self) -> Any:
        """Needs values."""
        if has_torch_function_unary(self):
            return handle_torch_function(Absent.tolist, (self,), self)
        raise self._elsewhere.refusal("tolist")

    def numpy(self, *, force: bool = False) -> Any:
        """Needs values."""
        if has_torch_function_unary(self):
            return handle_torch_function(Absent.numpy, (self,), self, force=force)
        raise self._elsewhere.refusal("numpy")

    @override
    def norm(self, *args: Any, **kwargs: Any) -> Any:
        """Torch's own, but in Lightning's ``grad_norm``, which would read it where nobody can tell why it fails."""
        if has_torch_function_unary(self):
            return handle_torch_function(Tensor.norm, (self,), self, *args, **kwargs)
        if sys._getframe(1).f_globals is vars(grads):
            raise self._elsewhere.refusal("grad_norm")
        return super().norm(*args, **kwargs)

    def __format__(self, spec: str) -> str:
        if has_torch_function_unary(self):
            text: str = handle_torch_function(Absent.__format__, (self,), self, spec)
            return text
        if spec:
            raise self._elsewhere.refusal("to read a number")
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Absent:
        if id(self) not in memo:
            arrivals = None if self._arrivals is None else self._arrivals.__deepcopy__(memo)
            copied = Absent(self, self._elsewhere, self.device, arrivals).requires_grad_(self.requires_grad)
            memo[id(self)] = copied
        found: Absent = memo[id(self)]
        return found

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        # Files are read where this class is not known.
        form = form_of(self)
        return (nn.Parameter(form, self.requires_grad) if self._is_param else form).__reduce_ex__(protocol)

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        elsewhere = self._elsewhere
        return f"Absent({elsewhere.name!r}, {tuple(self.shape)}, {self.dtype}, {elsewhere})"


def absent_parameter(
    parameter: nn.Parameter, elsewhere: Elsewhere, device: torch.device, arrivals: Arrivals
) -> nn.Parameter:
    """Returns what stands for a parameter whose values are on other ranks, with what users have written on it.

    Args:
        parameter: The parameter.
        elsewhere: Where the values are.
        device: Where this rank's parameters are.
        arrivals: Of gradients; one object for a module.
    """
    absent = Absent(parameter, elsewhere, device, arrivals).requires_grad_(parameter.requires_grad)
    vars(absent).update(vars(parameter))
    assert isinstance(absent, nn.Parameter)
    return absent


def arrivals_of(module: nn.Module) -> Arrivals:
    """Returns what the absent parameters of a module ask for gradients; a new one if it has none."""
    found = (each._arrivals for each in module.parameters() if isinstance(each, Absent) and each._arrivals)
    return next(found, Arrivals())


def check_readable(value: Any, act: str) -> None:
    """Refuses what is to be read and is absent here.

    Raises:
        ModuleError: It is.
    """
    if isinstance(value, Absent):
        raise value._elsewhere.refusal(act)


def form_of(tensor: Tensor) -> Tensor:
    """Returns a meta tensor of the form of a tensor."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _run(func: OpOverload, act: Operation, args: Sequence[Any], options: dict[str, Any]) -> Any:
    absent = _absent_in((*args, *options.values()))
    elsewhere = _common(absent, act.name)
    device = options.get("device") or absent[0].device
    written = [target for target in act.targets(args, options) if target is not None]
    # Other libraries' operations do what is not known here, such as to wait for ranks.
    if func.namespace != "aten" or act.name in _READS or torch.Tag.inplace_view in func.tags:
        raise elsewhere.refusal(_READS.get(act.name, act.name))
    if act.name in _FILLED:
        like = torch.empty(0, dtype=absent[0].dtype, device=absent[0].device)
        return func(like, *args[1:], **options)
    if any(not isinstance(target, Absent) for target in tensors_in(written)):
        raise elsewhere.refusal(f"{act.name} on a tensor that has values")
    if torch.Tag.nondeterministic_seeded in func.tags:
        if act.name in _DRAWN_BY_VALUE:
            raise elsewhere.refusal(act.name)
        drawn = func(*pytree.tree_map_only(Absent, _ones, tuple(args)), **pytree.tree_map_only(Absent, _ones, options))
    if written:
        return written[0] if len(written) == 1 else tuple(written)
    if torch.Tag.nondeterministic_seeded not in func.tags:
        drawn = _on_forms(func, act, args, options, elsewhere)
    return pytree.tree_map_only(Tensor, lambda form: Absent(form, elsewhere, torch.device(device)), drawn)


def _on_forms(
    func: OpOverload, act: Operation, args: Sequence[Any], options: dict[str, Any], elsewhere: Elsewhere
) -> Any:
    form_args, form_options = pytree.tree_map_only(Tensor, form_of, (tuple(args), options))
    if "device" in options:
        form_options["device"] = _META
    try:
        return func(*form_args, **form_options)
    except NotImplementedError as error:
        raise elsewhere.refusal(act.name) from error


def _lists(func: OpOverload, act: Operation, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """An operation on the tensors of several lists: those at places where nothing is absent are computed."""
    count = len(args[0])
    rows = {i for i, row in enumerate(args) if isinstance(row, list | tuple) and len(row) == count}
    beside = [_absent_in(args[i][at] for i in rows) for at in range(count)]
    common = _absent_in((*(args[i] for i in range(len(args)) if i not in rows), *options.values()))
    here = [at for at in range(count) if not (beside[at] or common)]

    def chosen(places: Sequence[int]) -> list[Any]:
        return [[row[at] for at in places] if i in rows else row for i, row in enumerate(args)]

    computed = dict(zip(here, func(*chosen(here), **options) or (), strict=False)) if here else {}
    for at in range(count):
        if at in here:
            continue
        elsewhere = _common([*beside[at], *common], act.name)
        targets = list(act.targets(chosen([at]), options))
        if any(not isinstance(target, Absent) for target in tensors_in(targets)):
            raise elsewhere.refusal(f"{act.name} on a tensor that has values")
        if not act.written:
            device = (beside[at] or common)[0].device
            (form,) = _on_forms(func, act, chosen([at]), options, elsewhere)
            computed[at] = Absent(form, elsewhere, device)
    return None if act.written else [computed[at] for at in range(count)]


def _draw_as_initialisation(absent: Absent, asking: FrameType) -> None:
    """Draws what an initialisation of torch does that asks whether it may leave a tensor out, and throws it away."""
    if asking.f_globals is not vars(init):
        return
    code = asking.f_code
    given = {name: asking.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
    real = {name: _ones(value) if value is absent else value for name, value in given.items()}
    vars(init)[code.co_name](**real)


def _absent_in(values: Iterable[Any]) -> list[Absent]:
    return [tensor for tensor in tensors_in(values) if isinstance(tensor, Absent)]


def _common(absent: Sequence[Absent], act: str) -> Elsewhere:
    """Returns where all of some tensors have values.

    Raises:
        ModuleError: Nowhere.
    """
    first = absent[0]._elsewhere
    ranks = first.ranks.intersection(*(each._elsewhere.ranks for each in absent))
    if not ranks:
        raise first.refusal(f"{act} together with parameters of other ranks")
    return first if ranks == first.ranks else Elsewhere(name=first.name, ranks=ranks, rank=first.rank)


def _ones(absent: Absent) -> Tensor:
    """Returns values that any distribution takes, for as many draws in the same order."""
    return torch.empty_strided(absent.shape, absent.stride(), dtype=absent.dtype, device=absent.device).fill_(1)
