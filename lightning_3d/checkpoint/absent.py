"""What stands in a state for a tensor whose values are on other ranks of the pipeline axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import Self

from lightning_3d.errors import CheckpointError
from lightning_3d.shards.absent import form_of

_META = torch.device("meta")
_CPU = torch.device("cpu")


class AbsentTensor(Tensor):
    """A tensor of which this rank knows the form alone: shape, strides, dtype and device.

    Hooks may compute with it as with any tensor. The result is absent too, and right on the ranks that have values.
    What would need values here fails. Travels between processes.

    Args:
        form: Any tensor of the form, a meta one too.
        cut: Whether the ranks that have it hold parts of it.
        device: Where it claims to be.
    """

    cut: bool

    def __new__(cls, form: Tensor, cut: bool = False, device: torch.device = _CPU) -> Self:
        """Makes a tensor without memory."""
        return Tensor._make_wrapper_subclass(cls, form.shape, form.stride(), dtype=form.dtype, device=device)

    def __init__(self, form: Tensor, cut: bool = False, device: torch.device = _CPU) -> None:
        self.cut = cut

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        written = next((args[at] for at, argument in enumerate(func._schema.arguments) if _writes(argument)), None)
        device = (kwargs or {}).get("device")
        try:
            if written is not None and not isinstance(written, AbsentTensor):
                raise RuntimeError("it would write absent values into a tensor that has some")
            form_args, form_kwargs = tree_map_only(Tensor, form_of, (tuple(args), {**(kwargs or {})}))
            if device is not None:
                form_kwargs["device"] = _META
            out = func(*form_args, **form_kwargs)
        except RuntimeError as error:
            raise CheckpointError(
                f"{func.overloadpacket} needs values that are on another pipeline rank: {error}",
                fix="compute on trainer.strategy.full_tensor(name, tensor), on every rank, and put the result in its "
                "place",
            ) from error
        if written is not None:
            return written
        return tree_map_only(Tensor, lambda form: cls(form, device=_CPU if device is None else device), out)

    def full_tensor(self) -> AbsentTensor:
        """Returns the whole tensor, which is absent as well."""
        return AbsentTensor(self, device=self.device)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return AbsentTensor, (form_of(self), self.cut, self.device)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AbsentTensor({tuple(self.shape)}, {self.dtype})"


def unknown() -> AbsentTensor:
    """Returns what stands for a tensor of which this rank knows nothing."""
    return AbsentTensor(torch.empty(0, device=_META))


def is_absent(value: object) -> bool:
    """Returns whether a tensor's values are on other ranks."""
    return isinstance(value, AbsentTensor) or (isinstance(value, Tensor) and value.is_meta)


def stand_in(value: Any) -> Any:
    """Returns what stands in a state for an absent parameter; other values as they are."""
    return AbsentTensor(value) if isinstance(value, Tensor) and value.is_meta else value


def present(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors that this rank has."""
    return {name: tensor for name, tensor in tensors.items() if not is_absent(tensor)}


def _writes(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
