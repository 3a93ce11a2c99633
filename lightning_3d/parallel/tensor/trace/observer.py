"""How weights can be cut, learned from what a step computes: the observer of the fake run for the tensor axis.

A weight that meets a replicated input is cut along its outputs (column; an embedding along its vocabulary). One that
meets an input whose features are cut is cut along its inputs (row). Where an operation has no exact form on shards, the
column weights that its shards come from stay whole, and the step is traced anew, until nothing changes. Names of
weights mean nothing here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.graph.observer import EndPass, Function, Observer, Proceed, ProceedModule, Scene, ValueRead
from lightning_3d.graph.parameters import ParameterTable
from lightning_3d.parallel.tensor.overrides import ForcedStyle
from lightning_3d.parallel.tensor.regions.plan import Region
from lightning_3d.parallel.tensor.regions.trial import CallSample
from lightning_3d.parallel.tensor.trace.decisions import Decisions
from lightning_3d.parallel.tensor.trace.entries import ENTRIES, Weights
from lightning_3d.parallel.tensor.trace.exchanges import Collectives
from lightning_3d.parallel.tensor.trace.meter import BlockNames, Meter
from lightning_3d.parallel.tensor.trace.shard import TracedShard, TraceGroup
from lightning_3d.parallel.tensor.trace.worth import Uses
from lightning_3d.shards.gathered import gathered
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.protocol import writes_to_first
from lightning_3d.shards.refusal import NeedsSegments, Unshardable

_VIEWS = ("view", "reshape", "unflatten", "view_as", "reshape_as")
# A view that splits features in more parts than these splits them in heads, not in q, k and v.
_MOST_PACKED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """What a trace has found.

    Attributes:
        size: Number of ranks.
        styles: "column", "row" or "vocab" and the layout, by first names of the weights that can be cut.
        rejected: Why weights stay whole, by first names.
        partial: First names of replicated parameters that are used on parts only, perhaps by what is computed from
            them.
        traffic: Collectives of each block; "" stands for all outside of blocks.
        calls: How modules were called that may become regions: the sampled ones and those that read values.
        reads: In which line a module reads values of hidden states.
    """

    size: int
    styles: Mapping[str, tuple[str, Layout]]
    rejected: Mapping[str, str]
    partial: frozenset[str]
    traffic: Mapping[str, Collectives]
    calls: Mapping[str, CallSample]
    reads: Mapping[str, str]


@dataclass(kw_only=True, slots=True)
class _Pass:
    """What is known in one pass only."""

    scene: Scene
    group: TraceGroup
    meter: Meter
    weights: Weights
    uses: Uses
    # How much was decided when it began.
    decided: int
    # Values that will be others in the next pass, by identity: nothing is decided about what they meet.
    unsure: dict[int, Tensor] = field(default_factory=dict)
    # Whether a region is running, a function has an unsure argument.
    region: bool = False
    blind: bool = False


class TensorTrace(Observer):
    """Watches a fake run and finds how each weight can be cut.

    Args:
        table: The module's parameters.
        size: Number of ranks.
        forced: Styles that the user wants, by first names; none says "replicate".
        forbidden: Why weights must stay whole, by first names.
        regions: Modules that run on local weights.
        sampled: Modules of which it is to be known how they are called.
        pad_vocabulary: Whether a vocabulary may be cut unevenly.
    """

    def __init__(
        self,
        table: ParameterTable,
        size: int,
        *,
        forced: Mapping[str, ForcedStyle] | None = None,
        forbidden: Mapping[str, str] | None = None,
        regions: Sequence[Region] = (),
        sampled: Collection[str] = (),
        pad_vocabulary: bool = False,
    ) -> None:
        self._table = table
        self._size = size
        self._forced = dict(forced or {})
        self._regions = {region.module: region for region in regions}
        self._sampled = frozenset(sampled)
        self._pad_vocabulary = pad_vocabulary
        self._decisions = Decisions(size, forbidden or {}, self._forced)
        self._names = BlockNames(table)
        self._calls: dict[str, CallSample] = {}
        self._reads: dict[str, str] = {}
        self._pass: _Pass | None = None

    def found(self) -> Traced:
        """Returns what the run has shown."""
        return Traced(
            size=self._size,
            styles=dict(self._now.weights.styles),
            rejected=dict(self._decisions.rejected),
            partial=self._now.meter.partial(
                {row.name: row.numel for row in self._table.rows}, frozenset(self._now.weights.styles)
            ),
            traffic=dict(self._now.meter.traffic),
            calls=dict(self._calls),
            reads=dict(self._reads),
        )

    @property
    def _now(self) -> _Pass:
        assert self._pass is not None, "nothing was traced"
        return self._pass

    @property
    def _changed(self) -> bool:
        """Whether this pass has taught anything."""
        return self._decisions.count != self._now.decided

    # ---- what the run asks ----

    def watched(self) -> frozenset[str]:
        """Regions, and what may become one."""
        return self._sampled | self._regions.keys()

    def tells_apart(self, block: str) -> object:
        """Blocks are told apart by what was decided about their weights before the trace."""
        return tuple(
            (name.removeprefix(block), str(self._forced.get(first, "")), first in self._decisions.rejected)
            for name, first in self._names.inside(block)
        ) + tuple(name.removeprefix(block) for name in self._regions if name.startswith(f"{block}."))

    def begin(self, scene: Scene) -> None:
        """Forgets the last pass, not what it decided."""
        group = TraceGroup(self._size, self)
        uses = Uses(self._decisions)
        weights = Weights(scene, group, self._decisions, uses, self._forced, self._pad_vocabulary)
        self._pass = _Pass(
            scene=scene,
            group=group,
            meter=Meter(scene, group),
            weights=weights,
            uses=uses,
            decided=self._decisions.count,
        )

    def end(self, output: Any) -> bool:
        """Asks for another pass if this one has taught anything."""
        now = self._now
        if not self._changed:
            leaves = pytree.tree_leaves(output)
            now.uses.ended([leaf for leaf in leaves if isinstance(leaf, TracedShard)])
            now.meter.finish(leaves)
            now.uses.judge(now.weights.styles)
        now.group.close()
        return self._changed

    def value_read(self, read: ValueRead) -> bool:
        """Values decide nothing that a plan must know; where they are read may become a region."""
        if read.module and not self._now.region:
            self._reads.setdefault(read.module, read.line)
            if read.call is not None:
                self._calls.setdefault(read.module, CallSample(args=read.call.args, kwargs=read.call.kwargs))
        return True

    # ---- functions ----

    def around_function(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: Proceed
    ) -> Any:
        """Hands weights over as shards, where they can be cut."""
        now, count = self._now, self._decisions.count
        if now.region:
            return proceed(function, args, kwargs)
        now.blind = bool(now.unsure) and any(id(leaf) in now.unsure for leaf in pytree.tree_leaves((args, kwargs)))
        entry = None if now.blind else ENTRIES.get(function)
        if entry is not None:
            args, kwargs = entry(now.weights, args, kwargs)
        operands = now.meter.calls.operands_of((args, kwargs))
        result = proceed(function, args, kwargs)
        if now.blind or count != self._decisions.count:
            written = args[:1] if writes_to_first(function) else ()
            now.unsure.update((id(leaf), leaf) for leaf in pytree.tree_leaves((written, result)))
        else:
            now.weights.follow(function, args, result)
            now.meter.calls.note(function, operands, result)
        return result

    def refused(self, function: str, shards: Sequence[TracedShard], refusal: Unshardable) -> None:
        """What the shards come from stays whole, or is cut in segments."""
        if self._now.blind:
            return
        origins = frozenset[str]().union(*(shard.origins for shard in _finest(shards)))
        if not isinstance(refusal, NeedsSegments):
            self._decisions.reject(origins, str(refusal))
            return
        count = len(refusal.segments)
        if function in _VIEWS:
            self._decisions.suspect(origins, self._heads(count))
            if count > _MOST_PACKED:
                self._decisions.reject(origins, str(refusal))
                return
        cut = {name: self._now.weights.styles[name][1].segments for name in origins}
        self._decisions.need(cut, refusal.segments, str(refusal))

    def computed(self, function: str, args: Any, shards: Sequence[TracedShard], result: Any) -> None:
        """Notes what shards were of use for."""
        if self._now.blind:
            return
        if function in _VIEWS and isinstance(result, TracedShard) and _splits_heads(shards[0], result):
            self._decisions.suspect(result.origins, self._heads(result.shape[-2]))
        self._now.uses.computed(args, shards, result)

    def _heads(self, count: int) -> str:
        return f"{count} {'head is' if count == 1 else 'heads are'} not a multiple of {self._size}"

    # ---- modules ----

    def around_module(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: ProceedModule) -> Any:
        """Counts what blocks communicate; a region computes with whole values, its weights are not looked at."""
        now = self._now
        if name in self._sampled:
            self._calls.setdefault(name, CallSample(args=args, kwargs=kwargs))
        if name in self._regions:
            return self._region(name, args, kwargs, proceed)
        return now.meter.call(name, args, kwargs, partial(self._made, proceed))

    def _made(self, proceed: ProceedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = proceed(args, kwargs)
        if self._changed:
            raise EndPass
        return output

    def repeated(self, block: str, first: str) -> None:
        """What was found for one block holds for its twin."""
        now, twins = self._now, self._names.twins(block, first)
        now.meter.repeated(block, first, twins)
        for origin, twin in twins.items():
            if twin != origin:
                now.weights.copy(origin, twin)
                now.uses.copy(origin, twin)
                self._decisions.copy(origin, twin)

    def _region(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: ProceedModule) -> Any:
        now = self._now
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, TracedShard):
                self._decisions.reject(leaf.origins, f"the local region {name} needs it whole")
        args, kwargs = pytree.tree_map_only(TracedShard, gathered, (args, kwargs))
        now.region = True
        output = now.meter.region(self._regions[name], args, kwargs, proceed)
        now.region = False
        return output


def _finest(shards: Sequence[TracedShard]) -> Sequence[TracedShard]:
    """Of shards that are cut in two ways those that are cut nearer to the end: keys in their heads, queries by head."""
    places = [shard.dim() - shard._dim for shard in shards]
    if len(set(places)) == 1 or any(shard.weight is not None for shard in shards):
        return shards
    return [shard for shard, place in zip(shards, places, strict=True) if place < max(places)]


def _splits_heads(before: TracedShard, after: TracedShard) -> bool:
    """Whether a view leaves the heads whole and cuts what is in them."""
    features = before._dim == before.dim() - 1
    return features and after.dim() > before.dim() and after._dim == after.dim() - 1
