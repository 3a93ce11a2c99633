"""Which dims of a module's weights belong together, learned by changing one index of one weight at a time.

In ``down @ act(up @ x)`` the gradient of ``down`` does not depend on ``down``, since what follows only adds up. And if
column 0 of ``down`` changes, so does the gradient of row 0 of ``up``, and of no other: that column and that row are one
hidden unit. Where ``gate`` and ``up`` are packed in one weight, rows 0 and I of it change, which are the beginnings of
its segments. This needs no knowledge of the operations, and finds the layout that sums over ranks are exact for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_3d.parallel.tensor.overrides import numberless
from lightning_3d.parallel.tensor.regions.trial import Trial
from lightning_3d.shards.layout import Layout

# Changes below this many rounding errors are none.
_ROUNDING = 1e3


@dataclass(frozen=True, slots=True)
class Pair:
    """Weights whose dims are cut together.

    Attributes:
        layouts: By name of the weight in the module; segments in the sizes of the trial.
        elements: Of all these weights.
    """

    layouts: Mapping[str, Layout]
    elements: int


def find_pairs(trial: Trial) -> tuple[Pair, ...]:
    """Returns what may be cut together, the largest first; the whole is known to run.

    Weights whose names differ in numbers only, and that have one shape, are cut alike.
    """
    kinds = _kinds(trial.weights)
    usual = _gradients(trial, trial.weights)
    pairs = []
    for kind, names in kinds.items():
        shape = trial.weights[names[0]].shape
        for dim in range(len(shape)) if len(shape) > 1 else ():
            changed = _gradients(trial, _changed(trial.weights, names, dim))
            if any(_differs(usual[name], changed[name]).any() for name in names):
                continue
            layouts = {kind: Layout(dim, (shape[dim],))}
            for other, members in kinds.items():
                layout = None if other == kind else _partner([(usual[name], changed[name]) for name in members])
                if layout is not None:
                    layouts[other] = layout
            if len(layouts) > 1:
                cut = {name: layout for each, layout in layouts.items() for name in kinds[each]}
                pairs.append(Pair(cut, sum(trial.weights[name].numel() for name in cut)))
    # Of two that hold the same weights the later dim goes first: the first one counts experts.
    return tuple(sorted(pairs, key=lambda pair: (-pair.elements, -max(layout.dim for layout in pair.layouts.values()))))


def _kinds(weights: Mapping[str, Tensor]) -> dict[tuple[str, torch.Size], list[str]]:
    kinds: dict[tuple[str, torch.Size], list[str]] = {}
    for name, value in weights.items():
        kinds.setdefault((numberless(name), value.shape), []).append(name)
    return kinds


def _gradients(trial: Trial, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    run = trial.run(weights)
    return run.gradients([1.0] * len(run.outputs))[1]


def _changed(weights: Mapping[str, Tensor], names: list[str], dim: int) -> dict[str, Tensor]:
    """The weights, with other values at index 0 of a dim of some."""
    changed = dict(weights)
    for name in names:
        changed[name] = weights[name].clone()
        changed[name].select(dim, 0).mul_(-2.0)
    return changed


def _differs(before: Tensor, after: Tensor) -> Tensor:
    largest = torch.maximum(before.abs().max(), after.abs().max())
    return (before - after).abs() > _ROUNDING * torch.finfo(before.dtype).eps * largest


def _partner(gradients: list[tuple[Tensor, Tensor]]) -> Layout | None:
    """How weights of one kind are cut along the dim in which their gradients changed at a few places only."""
    changed = torch.stack([_differs(before, after) for before, after in gradients]).any(0)
    found = None
    for dim, length in enumerate(changed.shape):
        places = changed.movedim(dim, 0).reshape(length, -1).any(1)
        at = places.nonzero().flatten().tolist()
        if at and len(at) * 2 <= length and (found is None or len(at) / length < found[0]):
            found = len(at) / length, dim, at, length
    if found is None:
        return None
    _, dim, at, length = found
    starts = [place for place in at if place - 1 not in at]
    if starts[0] != 0:
        return None
    return Layout(dim, tuple(end - start for start, end in zip(starts, [*starts[1:], length], strict=True)))
