"""Which parameters an optimizer steps: by name, group by group, on this rank and on a whole pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.agreement import gather
from lightning_3d.checkpoint.layout import parameter_names
from lightning_3d.errors import CheckpointError
from lightning_3d.shards.presence import Presence

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
        """Returns the members of a group, whose parameters have these names."""
        own = group.get(_OWN_NAMES)
        return cls(names=tuple(names), own_names=None if own is None else tuple(own))

    def group(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a group by names, with the options of another."""
        own = {} if self.own_names is None else {_OWN_NAMES: list(self.own_names)}
        return {key: value for key, value in options.items() if key != _OWN_NAMES} | own | {"params": list(self.names)}


def members_of(module: nn.Module, optimizer: Optimizer) -> tuple[Members, ...]:
    """Returns the parameters in the groups of an optimizer as they are now."""
    groups = zip(names_of(module, optimizer), optimizer.param_groups, strict=True)
    return tuple(Members.of(names, group) for names, group in groups)


def all_members(
    module: nn.Module, optimizer: Optimizer, presence: Presence | None, recorded: Sequence[Members] = ()
) -> tuple[Members, ...]:
    """Returns the parameters that an optimizer steps on all ranks of a pipeline, which call this together.

    Args:
        module: The module.
        optimizer: The optimizer; absent parameters may have been taken out of its groups.
        presence: The ranks of the pipeline, None without one.
        recorded: From :func:`members_of` before anything was taken out. Groups that have become others since, or came
            later, are put together from all ranks, in the order of the module.
    """
    here = members_of(module, optimizer)
    if presence is None:
        return here
    order = {name: (at, parameter.is_meta) for at, (parameter, name) in enumerate(parameter_names(module).items())}
    left = [tuple(name for name in group.names if not order[name][1]) for group in recorded]
    unchanged = [left[at : at + 1] == [group.names] for at, group in enumerate(here)]
    reports: list[tuple[list[bool], tuple[Members, ...]]] = gather(presence.group, (unchanged, here))
    found = []
    for at in range(len(here)):
        parts = [members[at] for _, members in reports]
        if all(same[at] for same, _ in reports):
            found.append(recorded[at])
        elif all(part == here[at] for part in parts):
            found.append(here[at])
        else:
            found.append(_joined(parts, sorted({name for part in parts for name in part.names}, key=order.__getitem__)))
    return tuple(found)


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


def _joined(parts: Sequence[Members], names: Sequence[str]) -> Members:
    own: dict[str, str] = {}
    for part in parts:
        own |= dict(zip(part.names, part.own_names or (), strict=False))
    return Members(names=tuple(names), own_names=tuple(own[name] for name in names) if own else None)
