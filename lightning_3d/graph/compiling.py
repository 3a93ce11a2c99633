"""Compiling with ``torch.compile``: the backend, what that needs of the machine, and random numbers as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils._triton import has_triton

from lightning_3d.errors import ConfigError

_INDUCTOR = "inductor"


def default_backend() -> str | Callable[..., Any]:
    """Returns the backend of ``torch.compile``: inductor, or what ``torch.compiler.set_default_backend`` was given."""
    # From torch 2.13 on.
    chosen: Callable[[], str | Callable[..., Any]] | None = getattr(torch.compiler, "get_default_backend", None)
    return _INDUCTOR if chosen is None else chosen()


def compiled(
    function: Callable[..., Any],
    *,
    backend: str | Callable[..., Any] | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
) -> Callable[..., Any]:
    """Returns a function that is compiled at its first call of each kind, and draws the random numbers it drew before.

    Args:
        function: What is compiled.
        backend: Of ``torch.compile``; by default `default_backend`.
        fullgraph: As in ``torch.compile``.
        dynamic: As in ``torch.compile``.
    """
    backend = default_backend() if backend is None else backend
    # Inductor would draw numbers of its own, so that masks would depend on what was compiled.
    options: dict[str, Any] | None = {"fallback_random": True} if backend == _INDUCTOR else None
    return torch.compile(function, fullgraph=fullgraph, dynamic=dynamic, backend=backend, options=options)


def check_compiler(device: torch.device) -> None:
    """Refuses a machine on which inductor cannot compile, before training instead of at the first step.

    Args:
        device: Where the compiled code runs.

    Raises:
        ConfigError: It has no C++ compiler, or for a GPU no Triton.
    """
    if default_backend() != _INDUCTOR:
        return
    if device.type == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            raise ConfigError(
                "compile=True needs a C++ compiler, and this machine has none that torch finds.",
                fix="install g++, or name one in the environment variable CXX, or compile=False",
            ) from None
    elif not has_triton():
        raise ConfigError(
            f"compile=True needs Triton for {device}, and torch finds none.", fix="pip install triton, or compile=False"
        )
