"""The tensors of a module: parameters, buffers, and those that the user keeps in plain attributes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

_REGISTRIES = ("_parameters", "_buffers", "_modules")


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Lists every name of every tensor, parameters first, then buffers, then plain attributes.

    Args:
        module: The whole module.

    Yields:
        Names, tied ones included, and tensors. Plain attributes may be tensors or containers of them, as torchmetrics'
        states are; an element is named by its path.
    """
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
    yield from named_attributes(module)


def named_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Lists the tensors in plain attributes of a module and its submodules; see :func:`named_tensors`."""
    for prefix, part in module.named_modules():
        attributes = {name: value for name, value in vars(part).items() if name not in _REGISTRIES}
        for path, leaf in tree_flatten_with_path(attributes)[0]:
            if isinstance(leaf, Tensor):
                yield ".".join([*([prefix] if prefix else []), *(_step(key) for key in path)]), leaf


def _step(key: Any) -> str:
    """Writes one step of a path: a dict's key, a sequence's index or an attribute."""
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))
