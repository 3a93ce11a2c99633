"""Hidden values that come to code which nobody gave them to: from attributes, lists and caches that modules fill."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.errors import ModuleError, user_line
from lightning_3d.graph.values import is_hidden

_HOLDERS = (list, tuple, dict)
_REGISTRIES = ("_parameters", "_modules")


class Leaks:
    """Tells values without values apart: of buffers on the meta device, of modules that run, and of nobody known.

    Args:
        module: The whole module, before a pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self._free = {id(value): value for child in module.modules() for _, value in _held(child)}
        self._inside: dict[int, tuple[Tensor, str, str]] = {}

    def is_foreign(self, value: Tensor) -> bool:
        """Returns whether a tensor that nobody is known to have made is hidden.

        Raises:
            ModuleError: It was made inside a module that did not return it.
        """
        if not is_hidden(value) or id(value) in self._free:
            return False
        self._refuse(value, to="the code around the blocks")
        return True

    def made_outside(self, output: Any, is_known: Callable[[object], bool]) -> None:
        """Notes what container code has made: of the batch and buffers, where nobody hidden is known."""
        for leaf in pytree.tree_leaves(output):
            if is_hidden(leaf) and not is_known(leaf):
                self._free[id(leaf)] = leaf

    def made_inside(self, output: Any, module: str) -> None:
        """Notes what was made inside a running module."""
        for leaf in pytree.tree_leaves(output):
            if is_hidden(leaf):
                self._inside.setdefault(id(leaf), (leaf, module, f"was made inside {module}"))

    def used_inside(self, leaves: list[Any], module: str, is_known: Callable[[object], bool]) -> None:
        """Refuses what another module has made and not returned.

        Raises:
            ModuleError: There is such a value.
        """
        for leaf in leaves:
            found = self._inside.get(id(leaf))
            if found is not None and found[1] != module and not is_known(leaf):
                self._refuse(leaf, to=module)

    def left_by(self, name: str, module: nn.Module, is_known: Callable[[object], bool]) -> None:
        """Notes what a module has left in attributes."""
        for path, child in module.named_modules():
            for key, value in _held(child):
                if not is_known(value) and id(value) not in self._free:
                    place = ".".join(filter(None, (name, path, key)))
                    self._inside[id(value)] = (value, name, f"is the attribute {place}")

    def _refuse(self, value: Tensor, *, to: str) -> None:
        found = self._inside.get(id(value))
        if found is not None:
            raise ModuleError(
                f"a hidden value comes to {to} ({user_line()}) without having been returned: it {found[2]}, which "
                "other stages do not run.",
                fix="return it from the block, in a tuple, list or dict (a dataclass hides it), and hand it on",
            )


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors without values in a module's attributes, with the attributes' names."""
    for key, value in vars(module).items():
        if isinstance(value, Tensor):
            leaves: list[Any] = [value]
        elif isinstance(value, _HOLDERS) and value and key not in _REGISTRIES:
            leaves = pytree.tree_leaves(value)
        else:
            continue
        yield from ((key, leaf) for leaf in leaves if is_hidden(leaf))
