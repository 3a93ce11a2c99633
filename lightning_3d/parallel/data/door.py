"""The way into a module that FSDP2 shards as a root, for calls of anything that uses its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from lightning_3d.graph.calls import OURS
from lightning_3d.parallel.data.zero import BackwardSettings

_NAME = f"{OURS}door"


class Door:
    """A method of the root around which FSDP2 gathers its parameters and registers its hooks.

    Args:
        root: The root.
    """

    def __init__(self, root: FSDPModule) -> None:
        self._root = root
        module = as_module(root)
        module.__dict__[_NAME] = _through
        register_fsdp_forward_method(module, _NAME)

    def __call__(self, step: Callable[..., Any], *args: Any) -> Any:
        """Returns ``step(*args)``."""
        return getattr(self._root, _NAME)(step, *args)


def only_by_doors(root: FSDPModule) -> None:
    """Leaves the gathering of a root to its door alone.

    A step that calls the whole module (``self(x)``) would be a forward inside the door's, and at its end torch takes
    the outer one for over: it would let go what is gathered, to gather it again for the backward.

    Args:
        root: A root that nobody calls but through a door.
    """
    state: Any = root._get_fsdp_state()
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        handle.remove()


def units_of(root: FSDPModule) -> list[FSDPModule]:
    """Returns the modules that FSDP2 shards, the root first."""
    return [child for child in as_module(root).modules() if isinstance(child, FSDPModule)]


def tell(unit: FSDPModule, settings: BackwardSettings) -> None:
    """Tells one unit what its next backward does."""
    # The class's own method: a stage's root answers torch's pipeline stage under the same name.
    FSDPModule.set_requires_gradient_sync(unit, settings.reduce_scatter, recurse=False)
    FSDPModule.set_requires_all_reduce(unit, settings.all_reduce, recurse=False)
    FSDPModule.set_reshard_after_backward(unit, settings.reshard, recurse=False)


def as_module(module: FSDPModule) -> nn.Module:
    """Returns the same object as what it also is."""
    assert isinstance(module, nn.Module)
    return module


def _through(step: Callable[..., Any], *args: Any) -> Any:
    return step(*args)
