"""Modules on tensors that are no parameters."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Leaves(nn.Module):
    """A module whose parameters are arguments, in the order of their names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: tuple[Tensor, ...], parameters: tuple[Tensor, ...], **options: Any) -> Any:
        for (name, _), value in zip(tuple(self.module.named_parameters()), parameters, strict=True):
            owner = self.module.get_submodule(name.rpartition(".")[0])
            owner._parameters.pop(name.rpartition(".")[2])
            owner.__dict__[name.rpartition(".")[2]] = value
        return self.module(*inputs, **options)
