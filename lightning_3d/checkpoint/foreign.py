"""Optimizers in the directories of Lightning's ModelParallelStrategy and FSDPStrategy: by names, entry by entry."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem

from lightning_3d.checkpoint.layout import canonical
from lightning_3d.checkpoint.sources import DirectoryTensors
from lightning_3d.checkpoint.tensors import read_values
from lightning_3d.errors import CheckpointError

_OPTIMIZER = re.compile(r"optimizer_(\d+)$")
_FIX = "load it once with Lightning and weights_only=False, if you trust who wrote it, and save it as one file"


class PlainPlanner(DefaultLoadPlanner):
    """Reads what is no tensor without running any code of it.

    Attributes:
        refused: The names of what is more than plain data.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.refused: list[str] = []

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Puts a value in its place."""
        name = read_item.dest_index.fqn
        try:
            self.state_dict[name] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            self.refused.append(name)


def optimizer_states(directory: DirectoryTensors, tensor: Callable[[str], Tensor]) -> list[dict[str, Any]]:
    """Returns the states of all optimizers by parameter names, as ``optimizers.optimizer_state`` has them.

    Args:
        directory: Whose index holds ``optimizer_<i>.state.<name>.<key>`` and ``optimizer_<i>.param_groups.<i>.<key>``.
        tensor: Makes what stands for a tensor, from its flat name.

    Raises:
        CheckpointError: A part of them is missing, or more than plain data.
    """
    planner = PlainPlanner()
    plain = read_values(directory.path, [name for name in directory.others if name in directory.paths], planner)
    if planner.refused:
        raise CheckpointError(
            f"{directory.path}: {planner.refused[0]} is more than plain data, which is not loaded", fix=_FIX
        )
    trees: dict[int, dict[Any, Any]] = {}
    for flat, path in directory.paths.items():
        found = _OPTIMIZER.match(str(path[0]))
        if found is None:
            continue
        value = tensor(flat) if flat in directory.forms else plain[flat]
        _put(trees.setdefault(int(found[1]), {}), path[1:], value)
    return [_state(trees[number], number) for number in sorted(trees)]


def _state(tree: Mapping[Any, Any], number: int) -> dict[str, Any]:
    groups = tree.get("param_groups")
    if not isinstance(groups, Mapping) or not all("params" in group for group in groups.values()):
        raise CheckpointError(
            f"optimizer {number} has no list of parameters, so its state belongs to nothing",
            fix="convert the weights alone: --weights-only",
        )
    listed = [dict(groups[at]) for at in sorted(groups)]
    for group in listed:
        group["params"] = [canonical(name) for name in group["params"]]
    return {"state": {canonical(n): state for n, state in tree.get("state", {}).items()}, "param_groups": listed}


def _put(tree: dict[Any, Any], path: tuple[str | int, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
