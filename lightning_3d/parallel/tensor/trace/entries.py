"""Where weights enter a computation: the functions that take one, and how it is cut there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.graph.observer import Function, Scene
from lightning_3d.parallel.tensor.overrides import ForcedStyle
from lightning_3d.parallel.tensor.trace.decisions import Decisions
from lightning_3d.parallel.tensor.trace.shard import TracedShard, TraceGroup
from lightning_3d.parallel.tensor.trace.worth import Uses
from lightning_3d.shards.layout import Layout

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Weights:
    """Cuts weights as they are met, in one pass.

    Attributes:
        styles: "column", "row" or "vocab" and the layout, by first names.

    Args:
        scene: Knows the names of parameters.
        group: The ranks.
        decisions: What was learned in passes before.
        uses: Hears of column weights.
        forced: What the user wants.
        pad_vocabulary: Whether a vocabulary may be cut unevenly.
    """

    def __init__(
        self,
        scene: Scene,
        group: TraceGroup,
        decisions: Decisions,
        uses: Uses,
        forced: Mapping[str, ForcedStyle],
        pad_vocabulary: bool,
    ) -> None:
        self.styles: dict[str, tuple[str, Layout]] = {}
        self._scene = scene
        self._group = group
        self._decisions = decisions
        self._uses = uses
        self._forced = forced
        self._pad_vocabulary = pad_vocabulary
        # Lengths of the tables that were met: a head has as many outputs.
        self._vocabularies: set[int] = set()
        # Weights with their two dims exchanged, by identity.
        self._exchanged: dict[int, tuple[Tensor, str]] = {}

    def follow(self, function: Function, args: tuple[Any, ...], result: Any) -> None:
        """A weight may be exchanged before it is used."""
        if function in _EXCHANGES and isinstance(result, Tensor) and result.dim() == 2:
            name = self._scene.name_of(args[0])
            if name is not None:
                self._exchanged[id(result)] = result, name

    def copy(self, name: str, other: str) -> None:
        """Holds for ``other`` what holds for ``name``."""
        if name in self.styles:
            self._record(other, *self.styles[name])

    # ---- linear maps ----

    def linear(self, x: Any, weight: Any, bias: Any, out_dim: int) -> tuple[Any, Any]:
        """Returns weight and bias of a linear map as they are cut.

        Args:
            x: Its input.
            weight: A matrix.
            bias: Of the outputs, or None.
            out_dim: The matrix' dim of outputs.
        """
        name, exchanged = self._known(weight)
        if name is None or weight.dim() != 2:
            return weight, bias
        wish = self._forced.get(name)
        features_cut = isinstance(x, TracedShard) and x._dim == x.dim() - 1
        if (wish is None and features_cut) or (wish is not None and wish.kind == "row"):
            return self._row(x, weight, name, 1 - out_dim, exchanged), bias
        if wish is None and isinstance(x, TracedShard):
            return weight, bias
        shard = self._column(weight, name, out_dim, exchanged, "column")
        return (weight, bias) if shard is None else (shard, self._bias(bias, shard, name))

    def table(self, indices: Any, weight: Any) -> Any:
        """Returns the table of an embedding as it is cut."""
        name = self._scene.name_of(weight)
        if name is None or isinstance(indices, TracedShard):
            return weight
        wish = self._forced.get(name)
        if wish is not None and wish.kind == "column":
            shard = self._column(weight, name, 1, False, "column")
        else:
            self._vocabularies.add(weight.shape[0])
            if wish is None:
                self._uses.table(name, *weight.shape)
            shard = self._column(weight, name, 0, False, "vocab")
        return weight if shard is None else shard

    def attention(self, arguments: dict[str, Any]) -> None:
        """Cuts the weights of ``multi_head_attention_forward`` along its heads."""
        together = "in_proj_weight"
        separate = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        keys = separate if arguments["use_separate_proj_weight"] else (together,)
        names = [self._scene.name_of(arguments[key]) for key in keys]
        out_name = self._scene.name_of(arguments["out_proj_weight"])
        if None in names or out_name is None:
            return
        known, heads, width = [name for name in names if name], arguments["num_heads"], arguments["embed_dim_to_check"]
        if heads % self._group.size:
            self._decisions.reject([*known, out_name], f"{heads} heads are not a multiple of {self._group.size}")
        if out_name in self._decisions.rejected:
            self._decisions.reject(known, _without_partner(out_name, self._decisions.rejected[out_name]))
        if any(name in self._decisions.rejected for name in (*known, out_name)):
            return
        if keys == (together,):
            self._decisions.start(known[0], (width,) * 3)
        shards = [self._column(arguments[key], name, 0, False, "column") for key, name in zip(keys, known, strict=True)]
        if any(shard is None for shard in shards):
            return
        arguments.update(zip(keys, shards, strict=True))
        layout = Layout(0, (width,) * 3)
        arguments["in_proj_bias"] = self._vector(arguments["in_proj_bias"], layout, known[0])
        out = self._cut(arguments["out_proj_weight"], out_name, "row", Layout(1, (width,)), False)
        if out is not None:
            out.origins = frozenset(known)
            arguments["out_proj_weight"] = out
            self._uses.paired(known)

    # ---- how ----

    def _column(self, weight: Tensor, name: str, out_dim: int, exchanged: bool, kind: str) -> TracedShard | None:
        rows, size = weight.shape[out_dim], self._group.size
        wish = self._forced.get(name)
        parts = 1 if wish is None else wish.segments
        segments = (rows // parts,) * parts if parts > 1 else self._decisions.segments.get(name, (rows,))
        layout = Layout(1 - out_dim if exchanged else out_dim, segments)
        if not layout.fits(size, padded=self._pad_vocabulary and rows in self._vocabularies):
            reason = f"{rows} {'rows' if layout.dim == 0 else 'columns'} are not a multiple of {size}"
            if wish is not None:
                raise wish.refused(name, reason)
            padding = not self._pad_vocabulary and rows in self._vocabularies and layout.fits(size, padded=True)
            self._decisions.reject([name], f"{reason} (pad_vocabulary=true pads them)" if padding else reason)
        if name in self._decisions.rejected:
            return None
        if kind == "column":
            self._uses.column(name, rows, weight.shape[1 - out_dim])
        return self._cut(weight, name, kind, layout, exchanged)

    def _row(self, x: Any, weight: Tensor, name: str, in_dim: int, exchanged: bool) -> Tensor:
        rejected = self._decisions.rejected.get(name)
        features_cut = isinstance(x, TracedShard) and x._dim == x.dim() - 1
        if rejected is not None:
            self._decisions.reject(x.origins, _without_partner(name, rejected))
            return weight
        segments = x._segments if features_cut else (weight.shape[in_dim],)
        layout = Layout(1 - in_dim if exchanged else in_dim, segments)
        shard = self._cut(weight, name, "row", layout, exchanged)
        if shard is None:
            return weight
        shard.origins = x.origins if features_cut else frozenset()
        return shard

    def _cut(self, weight: Tensor, name: str, kind: str, layout: Layout, exchanged: bool) -> TracedShard | None:
        if not self._record(name, kind, layout):
            return None
        dim = 1 - layout.dim if exchanged else layout.dim
        return TracedShard.of(weight, (dim, layout.segments), self._group, weight=name)

    def _bias(self, bias: Any, shard: TracedShard, name: str) -> Any:
        if bias is None or bias.shape[-1] != shard.shape[shard._dim]:
            return bias
        return self._vector(bias, Layout(bias.dim() - 1, shard._segments), name)

    def _vector(self, bias: Any, layout: Layout, name: str) -> Any:
        """A bias, cut as the outputs that it is added to; one that is no parameter is cut where it is used."""
        own = self._scene.name_of(bias)
        if own is None or own in self._decisions.rejected:
            return bias
        if not self._record(own, "column", layout):
            return bias
        shard = TracedShard.of(bias, (layout.dim, layout.segments), self._group, weight=own)
        shard.origins = frozenset({name})
        return shard

    def _record(self, name: str, kind: str, layout: Layout) -> bool:
        before = self.styles.setdefault(name, (kind, layout))
        if before[1] == layout:
            return True
        self._decisions.reject([name], f"it is used in two ways: {before[0]} {before[1]}, {kind} {layout}")
        return False

    def _known(self, weight: Any) -> tuple[str | None, bool]:
        """The name of a weight, and whether its dims are exchanged."""
        found = self._exchanged.get(id(weight))
        return (self._scene.name_of(weight), False) if found is None else (found[1], True)


def _without_partner(name: str, reason: str) -> str:
    return f"the row weight {name} that would sum its outputs stays whole: {reason}"


# ---- the functions, by their own signatures ----


def _linear(weights: Weights, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    bound = _LINEAR.bind(*args, **kwargs)
    bound.apply_defaults()
    x, weight, bias = bound.args
    return (x, *weights.linear(x, weight, bias, 0)), {}


def _addmm(weights: Weights, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    if kwargs or len(args) != 3:
        return args, kwargs
    bias, x, weight = args
    weight, bias = weights.linear(x, weight, bias, 1)
    return (bias, x, weight), {}


def _matmul(weights: Weights, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    if kwargs:
        return args, kwargs
    x, weight = args
    return (x, weights.linear(x, weight, None, 1)[0]), {}


def _embedding(weights: Weights, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    indices, weight, *others = args
    return (indices, weights.table(indices, weight), *others), kwargs


def _attention(weights: Weights, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    bound = _ATTENTION.bind(*args, **kwargs)
    bound.apply_defaults()
    weights.attention(bound.arguments)
    return (), dict(bound.arguments)


def _linear_signature(input: Any, weight: Any, bias: Any = None) -> None:  # noqa: A002 (torch's name)
    """As ``torch.nn.functional.linear``, which has none that can be read."""


_LINEAR = inspect.signature(_linear_signature)
_ATTENTION = inspect.signature(F.multi_head_attention_forward)
_PROPERTIES: tuple[Any, ...] = (Tensor.T, Tensor.mT)
_EXCHANGES = (torch.t, Tensor.t, torch.transpose, Tensor.transpose, *(each.__get__ for each in _PROPERTIES))

Entry = Callable[[Weights, tuple[Any, ...], dict[str, Any]], Arguments]
ENTRIES: Mapping[Function, Entry] = MappingProxyType(
    {
        F.linear: _linear,
        F.embedding: _embedding,
        F.multi_head_attention_forward: _attention,
        **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
        **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _matmul),
    }
)
