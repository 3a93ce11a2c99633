"""Which cuts are worth their communication: every sum over the ranks must save more than it costs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from lightning_3d.parallel.tensor.trace.decisions import Decisions
from lightning_3d.parallel.tensor.trace.shard import TracedShard

# A pair of weights whose inner width is at most this part of its outer one computes too little for its sums.
_NARROW = 4
# A vocabulary is longer than this, and its rows are at least twice its columns; positions are not.
_SHORT_TABLE = 64


def is_vocabulary(rows: int, columns: int) -> bool:
    """Returns whether a table holds a vocabulary, not positions or kinds."""
    return rows >= _SHORT_TABLE and rows >= 2 * columns


class Uses:
    """What the outputs of weights were of use for, in one pass.

    Args:
        decisions: Learns what is not worth it.
    """

    def __init__(self, decisions: Decisions) -> None:
        self._decisions = decisions
        self._columns: dict[str, tuple[int, int]] = {}
        self._paired: set[str] = set()
        self._ended: set[str] = set()

    def column(self, name: str, outputs: int, inputs: int) -> None:
        """A weight was cut along its outputs."""
        self._columns[name] = outputs, inputs

    def table(self, name: str, rows: int, columns: int) -> None:
        """A table is about to be cut along its rows."""
        if not is_vocabulary(rows, columns):
            self._decisions.reject([name], f"a table of {rows} rows saves less than the sums of its look-ups cost")

    def paired(self, names: Collection[str]) -> None:
        """Outputs of these weights were summed by a row weight."""
        self._paired.update(names)

    def ended(self, shards: Sequence[TracedShard]) -> None:
        """Shards leave the step: they are gathered if anybody looks."""
        for shard in shards:
            self._ended.update(shard.origins)

    def copy(self, name: str, other: str) -> None:
        """Holds for ``other`` what holds for ``name``."""
        if name in self._columns:
            self._columns[other] = self._columns[name]
        for names in (self._paired, self._ended):
            if name in names:
                names.add(other)

    def computed(self, args: Any, shards: Sequence[TracedShard], result: Any) -> None:
        """An operation on shards was computed."""
        outputs = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
        values = [shard for shard in shards if shard.weight is None]
        weights = [shard for shard in shards if shard.weight is not None]
        if not outputs:
            return
        if any(isinstance(output, TracedShard) for output in outputs):
            self._check_whole(args, values)
            return
        origins = frozenset[str]().union(*(shard.origins for shard in values or weights))
        (self._paired if weights else self._ended).update(origins)
        if values and weights:
            self._check_width(weights[0], origins)
        elif len(values) > 1 and outputs[0].numel() > max(value.numel() for value in values):
            self._decisions.reject(origins, "the sum of a product that is larger than its factors")

    def judge(self, styles: Mapping[str, tuple[str, object]]) -> None:
        """Rejects weights whose outputs were of no use as shards."""
        for name, (outputs, inputs) in self._columns.items():
            if name in self._paired or styles[name][0] != "column":
                continue
            if name not in self._ended:
                self._decisions.reject([name], "no row weight sums its outputs: they would only be gathered")
            elif outputs < inputs:
                self._decisions.reject(
                    [name], f"{outputs} outputs of {inputs} inputs save less than the sums of gradients cost"
                )

    def _check_width(self, weight: TracedShard, origins: frozenset[str]) -> None:
        inner = weight.shape[weight._dim]
        outer = weight.numel() // inner
        if inner * _NARROW <= outer:
            self._decisions.reject(origins, f"an inner width of {inner} beside {outer} saves less than its sums cost")

    def _check_whole(self, args: Any, values: Sequence[TracedShard]) -> None:
        """Features of activations that are whole, such as a residual, are not cut for those of others."""
        features = [value for value in values if value._dim == value.dim() - 1]
        for leaf in pytree.tree_leaves(args) if features else ():
            if not _is_whole_activation(leaf):
                continue
            for value in features:
                if leaf.dim() and leaf.shape[-1] == value.shape[-1]:
                    self._decisions.reject(value.origins, "its outputs meet activations that are whole")


def _is_whole_activation(value: Any) -> bool:
    """What comes from parameters and is none, and has to learn of its use on parts."""
    if not isinstance(value, FakeTensor) or isinstance(value, nn.Parameter):
        return False
    return value.requires_grad or not torch.is_grad_enabled()
