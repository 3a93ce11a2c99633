"""Which parameters an optimizer steps: by name, group by group, on this rank and on a whole pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.layout import parameter_names
from lightning_3d.errors import CheckpointError

# Where torch keeps the names that users give with their parameters.
_OWN_NAMES = "param_names"
_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Members:
    """The parameters of one group of an optimizer, on all ranks of a pipeline.

    Attributes:
        names: Their names in the module.
        own_names: The names that the user gave with them; None if they came without.
    """

    names: tuple[str, ...]
    own_names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, names: Sequence[str], group: Mapping[str, Any]) -> Members:
        """Returns the members of a group that has no parameter taken out."""
        own = group.get(_OWN_NAMES)
        return cls(names=tuple(names), own_names=None if own is None else tuple(own))

    def group(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a group by names, with the options of another."""
        own = {} if self.own_names is None else {_OWN_NAMES: list(self.own_names)}
        return {key: value for key, value in options.items() if key != _OWN_NAMES} | own | {"params": list(self.names)}


def all_members(module: nn.Module, optimizer: Optimizer, taken_from: Sequence[Members] = ()) -> list[Members]:
    """Returns the parameters that an optimizer steps on all ranks of a pipeline, group by group.

    Args:
        module: The module.
        optimizer: The optimizer. Groups that were added since still have the absent parameters in them.
        taken_from: From :func:`take_absent`; empty where nothing was taken out.
    """
    names = names_of(module, optimizer)[len(taken_from) :]
    groups = optimizer.param_groups[len(taken_from) :]
    return [*taken_from, *(Members.of(own, group) for own, group in zip(names, groups, strict=True))]


def take_absent(module: nn.Module, optimizer: Optimizer, known: Sequence[Members] = ()) -> tuple[Members, ...]:
    """Takes absent parameters out of an optimizer, their state too, and returns what was in its groups.

    Args:
        module: The module whose parameters it steps, those of other pipeline ranks on the meta device.
        optimizer: The optimizer. Its lists stay the same objects.
        known: What an earlier call returned; groups may have been added, or all replaced, since.
    """
    members = []
    for number, (names, group) in enumerate(zip(names_of(module, optimizer), optimizer.param_groups, strict=True)):
        absent = [parameter.is_meta for parameter in group["params"]]
        before = known[number].names if number < len(known) else ()
        left = [name for name in before if name in names]
        members.append(known[number] if before and left == names and not any(absent) else Members.of(names, group))
        for parameter in compress(group["params"], absent):
            # Some optimizers make state before their first step.
            optimizer.state.pop(parameter, None)
        for key in {"params", _OWN_NAMES} & group.keys():
            group[key][:] = [entry for entry, gone in zip(group[key], absent, strict=True) if not gone]
    return tuple(members)


def names_of(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Returns the names of the parameters that an optimizer holds, group by group."""
    names = parameter_names(module)
    strange = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter not in names]
    if strange:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in strange[:_SHOWN])
        raise CheckpointError(
            f"{type(optimizer).__name__} steps {len(strange)} parameters that are not in the module, of shape {shapes}",
            fix="give the optimizer the parameters of the LightningModule, as configure_optimizers sees them",
        )
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
