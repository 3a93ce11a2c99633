"""Products in groups without values: torch foretells results in 16 bit alone, though its kernels have 32 bit too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_GROUPED = ("grouped_mm", "_grouped_mm")


def in_a_known_precision(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what a function of torch returns, also for grouped products of FakeTensors that are not in 16 bit.

    Args:
        function: Any function.
        args: Its arguments.
        kwargs: Those with a name.
    """
    if getattr(function, "__name__", "") not in _GROUPED or args[0].dtype == torch.bfloat16:
        return function(*args, **kwargs)
    cast = [one.to(torch.bfloat16) if isinstance(one, Tensor) and one.is_floating_point() else one for one in args]
    return function(*cast, **kwargs).to(args[0].dtype)
