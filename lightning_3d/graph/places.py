"""Where in the user's code a function of torch is called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_3d.graph.calls import Call

_ROOMS = tuple(str(Path(__file__).parents[1] / room) for room in ("graph", "shards", "parallel"))
_TORCH = str(Path(torch.__file__).parent)
_CALL = nn.Module._call_impl.__code__


def innermost_call() -> Call | None:
    """Returns the call of a module that runs here, or None outside of all; its function is the module."""
    for frame in _frames():
        if frame.f_code is _CALL:
            known = frame.f_locals
            return Call(known["self"], known["args"], known["kwargs"])
    return None


def user_line() -> str:
    """Returns file and line of the code that called torch."""
    for frame in _frames():
        file = frame.f_code.co_filename
        if not file.startswith((*_ROOMS, _TORCH, "<")):
            return f"{file}:{frame.f_lineno}"
    return "an unknown place"


def _frames() -> Iterator[Any]:
    frame: Any = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back
