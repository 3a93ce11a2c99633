"""``copy.deepcopy`` of a module that is cut: the user's module again, its parameters held as the original's are."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_3d.graph.calls import OURS, own_attributes
from lightning_3d.parallel.tensor.reading.aliases import aliases_of

# Told of each copy, not of the parts of one, and of the name that its original has in the user's module.
Made = Callable[[nn.Module, str], None]

_DEEPCOPY = "__deepcopy__"
_OUTERMOST = f"{OURS}outermost"
# Whose hooks a copy does without: it is no unit of FSDP2, and nobody runs steps on it.
_LIBRARIES = (__name__.partition(".")[0], "torch.distributed")
# What FSDP2 leaves on the modules that it shards.
_OF_FSDP = ("__composable_api_state_key", "_is_fsdp_managed_module", "_fsdp_use_orig_params")


def serve_copying(module: nn.Module, name: str, made: Made) -> None:
    """Has ``copy.deepcopy`` of a module and of its parts go on working when the module is cut.

    Args:
        module: The module, not cut yet, or a copy.
        name: The name of what it is a copy of in the user's module, or its own.
        made: Told of the copies.
    """
    for inner, part in module.named_modules():
        full = ".".join(filter(None, (name, inner)))
        part.__dict__[_DEEPCOPY] = _Copier(part, type(part), full, made)


class _Copier:
    """Copies one module, in the place of what its present class would do.

    Args:
        module: The module.
        cls: Its class as the user made it.
        name: See `Made`.
        made: Told of copies.
    """

    __slots__ = ("_cls", "_made", "_module", "_name")

    def __init__(self, module: nn.Module, cls: type[nn.Module], name: str, made: Made) -> None:
        # A copy is gone with the last who holds it.
        self._module = weakref.ref(module)
        self._cls, self._name, self._made = cls, name, made

    def __call__(self, memo: dict[Any, Any]) -> Any:
        """Returns the copy."""
        module = self._module()
        assert module is not None, "whoever asks has it"
        outermost = memo.setdefault(_OUTERMOST, self) is self
        twin: Any = object.__new__(self._cls)
        vars(twin).update(_attributes(module))
        own = getattr(self._cls, _DEEPCOPY, None)
        if own is None:
            function, args, state, *_ = twin.__reduce_ex__(4)
            copied = memo[id(module)] = function(*args)
            copied.__setstate__(copy.deepcopy(state, memo))
        else:
            copied = memo[id(module)] = own(twin, memo)
        if outermost:
            del memo[_OUTERMOST]
            self._made(copied, self._name)
        return copied


def _attributes(module: nn.Module) -> dict[str, Any]:
    """What the user and torch have put into a module."""
    own = own_attributes(module) | aliases_of(module)
    own = {name: value for name, value in own.items() if name != _DEEPCOPY and not name.startswith(_OF_FSDP)}
    for name, value in own.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            own[name] = OrderedDict((key, hook) for key, hook in value.items() if not _is_theirs(hook))
    return own


def _is_theirs(hook: Any) -> bool:
    home = getattr(hook, "__module__", None) or ""
    return home.startswith(_LIBRARIES)
