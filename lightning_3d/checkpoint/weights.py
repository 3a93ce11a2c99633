"""A module's weights: a state of shards or whole tensors is put into it, each rank its part, and what did not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.absent import is_absent
from lightning_3d.checkpoint.agreement import gather
from lightning_3d.checkpoint.gathering import gather_whole
from lightning_3d.checkpoint.layout import canonical, laid_out, module_tensors
from lightning_3d.checkpoint.packed import NO_LAYOUTS, unpacked
from lightning_3d.checkpoint.report import LoadedPart
from lightning_3d.errors import CheckpointError, few_and_more
from lightning_3d.graph.parameters import class_name
from lightning_3d.shards.absent import form_of
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.presence import Presence


@dataclass(frozen=True, kw_only=True, slots=True)
class StateAsRead:
    """A state before hooks could edit it.

    Attributes:
        values: What it held, and how often that had been written to.
        dtypes: The dtypes in the checkpoint.
    """

    values: Mapping[str, tuple[Any, int]]
    dtypes: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, state: Mapping[str, Any], dtypes: Mapping[str, torch.dtype]) -> StateAsRead:
        """Notes a state."""
        return cls(values={name: (value, _version(value)) for name, value in state.items()}, dtypes=dtypes)

    def edited(self, state: Mapping[str, Any]) -> list[str]:
        """Returns what a state has that is not as it was read, and what it does not have any more."""
        strange = (None, 0)
        found = []
        for name, value in state.items():
            before, version = self.values.get(name, strange)
            if before is not value or version != _version(value):
                found.append(name)
        return found + [f"{name} taken out" for name in self.values if name not in state]


def load_module_state(
    module: nn.Module,
    state: Mapping[str, Any],
    *,
    strict: bool,
    layouts: Mapping[str, Layout] = NO_LAYOUTS,
    presence: Presence | None = None,
    as_read: StateAsRead | None = None,
) -> LoadedPart:
    """Loads a state of shards or whole tensors into the module, each rank its part, and returns what became of it.

    Args:
        module: The module.
        state: From :func:`read_module_state`, possibly edited; whole tensors are the same on every rank.
        strict: Whether names must match exactly (Lightning's ``strict_loading``).
        layouts: See ``layout.module_state``.
        presence: The ranks of the pipeline, which then call this together; None without one.
        as_read: The state before hooks could edit it.

    Raises:
        CheckpointError: The state is of another model: names what is missing, unexpected or of another shape.
    """
    targets = module_tensors(module, layouts)
    part = _part(module, state, targets, presence, as_read)
    if presence is not None:
        state = _with_moved(state, targets, presence)
    own_names = {canonical(name): name for name in _state_names(module)}
    fitting: dict[str, Any] = {}
    for name, value in state.items():
        target = targets.get(name)
        fits = isinstance(value, Tensor) and target is not None and target.shape == value.shape
        fitting[own_names.get(name, name)] = _fitting(value, targets[name]) if fits else unpacked(value)
    try:
        module.load_state_dict(fitting, strict=strict)
    except RuntimeError as error:
        raise _misfit(module, state, targets, error) from error
    return part


def _part(
    module: nn.Module,
    state: Mapping[str, Any],
    targets: Mapping[str, Tensor],
    presence: Presence | None,
    as_read: StateAsRead | None,
) -> LoadedPart:
    """Returns what becomes of a state when it is loaded."""
    expected = dict.fromkeys(canonical(name) for name in module.state_dict())
    known = {*expected, *targets}
    edited = [] if as_read is None else as_read.edited(state)
    if presence is not None:
        edited = list(dict.fromkeys(name for names in gather(presence.group, edited) for name in names))
    dtypes = {} if as_read is None else as_read.dtypes
    casts = {
        name: f"{name}: {dtypes[name]} to {targets[name].dtype}"
        for name in state
        if name in dtypes and name in targets and dtypes[name] != targets[name].dtype and name not in edited
    }
    changed = {*edited, *casts}
    return LoadedPart(
        name="weights",
        restored=tuple(name for name in state if name in known and name not in changed),
        converted=tuple(casts.values()),
        edited=tuple(edited),
        missing=tuple(name for name in expected if name not in state),
        unexpected=tuple(name for name in state if name not in known),
    )


def _version(value: Any) -> int:
    """How often a tensor was written to, as far as this rank has it."""
    local = unpacked(value)
    local = local._local_tensor if isinstance(local, DTensor) else local
    if not isinstance(local, Tensor) or is_absent(local) or local.is_inference():
        return 0
    return local._version


def _with_moved(state: Mapping[str, Any], targets: Mapping[str, Tensor], presence: Presence) -> dict[str, Any]:
    """Brings what a hook has put, from a tensor that is absent here, in the place of one that is not."""
    mine = [
        name for name, value in state.items() if is_absent(value) and name in targets and not is_absent(targets[name])
    ]
    moved = dict.fromkeys(name for names in gather(presence.group, mine) for name in names)
    values = gather_whole({name: state[name] for name in moved if name in state}, True, {}, presence) if moved else {}
    return {**state, **{name: values[name] for name in mine}}


def _fitting(value: Tensor, target: Tensor) -> Tensor:
    """Returns a value for a tensor of its shape, as it lies here."""
    shards: Tensor = form_of(target) if is_absent(target) else unpacked(laid_out(value, target))
    return shards


def _state_names(module: nn.Module) -> set[str]:
    tensors = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return {*tensors, *(name for name, _ in module.named_buffers(remove_duplicate=False)), *module.state_dict()}


def _misfit(
    module: nn.Module, state: Mapping[str, Any], targets: Mapping[str, Tensor], error: RuntimeError
) -> CheckpointError:
    expected = {canonical(name) for name in module.state_dict()}
    shapes = {
        name: f"{name}: saved {tuple(value.shape)}, here {tuple(targets[name].shape)}"
        for name, value in state.items()
        if isinstance(value, Tensor) and name in targets and targets[name].shape != value.shape
    }
    kinds = {
        "missing": [name for name in expected if name not in state],
        "unexpected": [name for name in state if name not in expected],
        "of another shape": list(shapes.values()),
    }
    found = [f"{len(names)} {kind} ({few_and_more(sorted(names))})" for kind, names in kinds.items() if names]
    strict_fix = "load the checkpoint of this model, or let it load in part: LightningModule.strict_loading = False"
    return CheckpointError(
        f"the checkpoint does not fit {class_name(module)}: {', '.join(found) or error}",
        fix="build the model with the sizes it was saved with" if shapes else strict_fix,
    )
