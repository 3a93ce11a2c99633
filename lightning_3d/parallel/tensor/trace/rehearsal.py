"""A finished plan on a virtual rank: what it communicates, and whose gradients can be summed later."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.graph.observer import Function, Observer, Proceed, ProceedModule, Scene, ValueRead
from lightning_3d.graph.parameters import ParameterTable
from lightning_3d.graph.repeats import Repeatable, alike
from lightning_3d.parallel.tensor.regions.plan import Region
from lightning_3d.parallel.tensor.trace.exchanges import Collectives
from lightning_3d.parallel.tensor.trace.meter import BlockNames, Meter
from lightning_3d.parallel.tensor.trace.shard import TracedShard, TraceGroup
from lightning_3d.shards.gathered import gathered
from lightning_3d.shards.group import ShardOptions
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.partial import PartialTensor
from lightning_3d.shards.refusal import Unshardable
from lightning_3d.shards.tensor import ShardTensor


class _HeldShard(TracedShard, Repeatable):
    """A shard that blocks hand on; nothing is asked of where it comes from."""

    __slots__ = ()

    def looks(self) -> object:
        """How it is cut."""
        return self._dim, self._segments

    def again(self) -> Tensor:
        """Another local part."""
        return self.like(alike(self._local), self._dim, self._segments)


class Rehearsal(Observer):
    """Watches a fake run in which weights are held as a plan has them, and changes nothing of it.

    Args:
        table: The module's parameters.
        size: Number of ranks.
        layouts: How parameters are cut, by first names.
        partial: First names of replicated parameters whose gradients are summed later.
        regions: Modules that run on local weights.
        sequence: Sequence parallelism.
    """

    # Of the run that has begun.
    _scene: Scene
    _group: TraceGroup
    _meter: Meter

    def __init__(
        self,
        table: ParameterTable,
        size: int,
        layouts: Mapping[str, Layout],
        *,
        partial: Collection[str] = (),
        regions: Sequence[Region] = (),
        sequence: bool = False,
    ) -> None:
        self._numels = {row.name: row.numel for row in table.rows}
        self._names = BlockNames(table)
        self._size = size
        self._layouts = layouts
        self._partial = frozenset(partial)
        self._regions = {region.module: region for region in regions}
        self._options = ShardOptions(sequence=sequence)
        self._in_region = False

    @property
    def traffic(self) -> Mapping[str, Collectives]:
        """Collectives of each block; "" stands for all outside of blocks."""
        return self._meter.traffic

    def partial(self) -> frozenset[str]:
        """Returns first names of replicated parameters that are used on parts only."""
        return self._meter.partial(self._numels, frozenset(self._layouts))

    def watched(self) -> frozenset[str]:
        """Regions."""
        return frozenset(self._regions)

    def tells_apart(self, block: str) -> object:
        """Blocks are told apart by how their weights are held."""
        return tuple(
            (name.removeprefix(block), str(self._layouts.get(first)), first in self._partial)
            for name, first in self._names.inside(block)
        ) + tuple(name.removeprefix(block) for name in self._regions if name.startswith(f"{block}."))

    def begin(self, scene: Scene) -> None:
        """Begins to count."""
        self._scene = scene
        self._group = TraceGroup(self._size, self, self._options)
        self._meter = Meter(scene, self._group)

    def end(self, output: Any) -> bool:
        """Counts what lies outside of blocks."""
        self._meter.finish(pytree.tree_leaves(output))
        self._group.close()
        return False

    def value_read(self, read: ValueRead) -> bool:
        """Values decide nothing here."""
        return True

    def around_function(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: Proceed
    ) -> Any:
        """Hands weights over as a step will read them."""
        if self._in_region:
            return proceed(function, args, kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, self._shown, (args, kwargs))
        operands = self._meter.calls.operands_of((args, kwargs))
        result = proceed(function, args, kwargs)
        self._meter.calls.note(function, operands, result)
        return result

    def around_module(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: ProceedModule) -> Any:
        """Counts what blocks communicate."""
        if name not in self._regions:
            return self._meter.call(name, args, kwargs, proceed)
        args, kwargs = pytree.tree_map_only(ShardTensor, gathered, (args, kwargs))
        self._in_region = True
        output = self._meter.region(self._regions[name], args, kwargs, proceed)
        self._in_region = False
        return output

    def repeated(self, block: str, first: str) -> None:
        """What was counted for one block holds for its twin."""
        self._meter.repeated(block, first, self._names.twins(block, first))

    def refused(self, function: str, shards: Sequence[TracedShard], refusal: Unshardable) -> None:
        """What has no exact form runs on the gathered whole."""

    def computed(self, function: str, args: Any, shards: Sequence[TracedShard], result: Any) -> None:
        """Nothing is decided."""

    def _shown(self, value: Tensor) -> Tensor:
        name = self._scene.name_of(value)
        if name is None:
            return value
        layout = self._layouts.get(name)
        if layout is not None:
            return _HeldShard.of(value, (layout.dim, layout.segments), self._group, weight=name)
        return PartialTensor(value, self._group) if name in self._partial else value
