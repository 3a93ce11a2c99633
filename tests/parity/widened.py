"""Models whose code computes in fp32 inside, run in fp64 throughout: what remains of a difference is no rounding."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

# Through many blocks with routers, rounding to fp32 grows until a bound for it would show little.
WIDENED = ("HF Mixtral, router losses, 8 blocks",)


class _Wide(types.ModuleType):
    """torch, without fp32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float", "float32") else getattr(torch, name)


@contextmanager
def widened(model: str, precision: str) -> Iterator[None]:
    """Context in which a model of `WIDENED` computes in fp64 where its code says fp32, if that is its precision."""
    if model not in WIDENED or precision != "64-true":
        yield
        return
    from transformers.models.mixtral import modeling_mixtral

    with (
        mock.patch.object(modeling_mixtral, "torch", _Wide("torch")),
        mock.patch.object(Tensor, "float", Tensor.double),
    ):
        yield
