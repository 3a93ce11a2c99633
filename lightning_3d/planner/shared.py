"""What the prices of many meshes have in common: computed once for one model on one cluster."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, TypeVar

from lightning_3d.planner.case import Case
from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.constants import Constants
from lightning_3d.planner.layout import Kind, Layout, place_blocks
from lightning_3d.planner.model import ModelGraph, Part, forward_flops
from lightning_3d.planner.recipes import byte_recipe
from lightning_3d.planner.shapes import MeshShape
from lightning_3d.planner.software import Software
from lightning_3d.planner.speed import Group, PartTimes, Speed

T = TypeVar("T")


class Shared:
    """A model on a cluster, and sums over its blocks.

    Args:
        model: The model.
        cluster: The cluster.
        bytes_recipe: Name of the recipe of bytes per parameter.
        software: What runs.
        constants: What the formulas leave open.

    Raises:
        ConfigError: There is no such recipe.
    """

    def __init__(
        self,
        model: ModelGraph,
        cluster: Cluster,
        bytes_recipe: str,
        software: Software,
        constants: Constants,
    ) -> None:
        self.model = model
        self.cluster = cluster
        self.recipe_name = bytes_recipe
        self.recipe = byte_recipe(bytes_recipe)
        self.software = software
        self.constants = constants
        self.speed = Speed(cluster=cluster, recipe=self.recipe, software=software, constants=constants)
        self._known: dict[tuple[Any, ...], Any] = {}
        self.blocks = tuple(model.blocks)
        self.costs = [part.forward_flops or float(part.parameters) for part in self.blocks]
        self.flops = forward_flops(model)
        self.again = {
            "none": 0.0,
            "selective": sum(part.attention_flops + part.again_flops for part in self.blocks),
            "full": sum(part.forward_flops for part in self.blocks),
        }
        self.kinds = tuple(dict.fromkeys(self.blocks))
        self.uniform = len(self.kinds) == 1

    @property
    def reduced(self) -> float:
        """Bytes of a gradient's element as it travels."""
        return self.recipe.reduced if self.software.reduced is None else self.software.reduced

    @property
    def gathered(self) -> float:
        """Bytes of a weight's element as it travels."""
        return self.recipe.computed if self.software.gathered is None else self.software.gathered

    def once(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """Returns what ``make`` returned when it was first asked with this key.

        Args:
            key: What the figure is, and all that it depends on.
            make: Computes it.
        """
        if key not in self._known:
            self._known[key] = make()
        found: T = self._known[key]
        return found

    def state(self, case: Case) -> float:
        """Bytes of a sample's hidden state between stages."""
        cut = case.mesh.tensor_parallel_size if case.mesh.sequence_parallel else 1
        return self.blocks[-1].state * self.recipe.computed / 2 / cut

    def layout(self, case: Case) -> Layout:
        """Returns where the blocks lie."""
        mesh = case.mesh
        key = ("layout", case.schedule, mesh.pipeline_parallel_size, case.stages_per_rank, mesh.layers_per_stage)
        return self.once(
            key,
            lambda: place_blocks(
                self.costs,
                schedule=case.schedule,
                ranks=mesh.pipeline_parallel_size,
                stages_per_rank=case.stages_per_rank,
                last_cost=self.model.last.forward_flops,
                layers_per_stage=mesh.layers_per_stage,
                uniform=self.uniform,
            ),
        )

    def part_times(self, part: Part, case: Case) -> PartTimes:
        """Returns the times of a part for one micro-batch."""
        mesh = case.mesh
        tensor = Group(size=mesh.tensor_parallel_size, stride=mesh.stride("tensor"))
        return self.once(
            ("part", part, tensor.size, tensor.stride, case.batch.micro_size, mesh.sequence_parallel, case.kind),
            lambda: self.speed.part(
                part,
                samples=case.batch.micro_size,
                tensor=tensor,
                sequence_parallel=mesh.sequence_parallel,
                kind=case.kind,
            ),
        )

    def time_prefixes(self, case: Case) -> tuple[list[float], ...]:
        """Sums over the blocks of forward, backward, what is computed again in it, and the tensor axis."""
        mesh, micro_size = case.mesh, case.batch.micro_size
        tensor = (mesh.tensor_parallel_size, mesh.stride("tensor"), mesh.sequence_parallel)

        def sums() -> tuple[list[float], ...]:
            rows = [self.part_times(part, case) for part in self.blocks]
            columns = ([getattr(row, name) for row in rows] for name in ("forward", "backward", "again", "tensor"))
            return tuple(list(accumulate(column, initial=0.0)) for column in columns)

        return self.once(("times", *tensor, micro_size, case.kind), sums)

    def parameter_prefix(self, tensor: int, shards: int) -> list[float]:
        """Sums over the blocks of their elements on a rank, padded for the shards."""
        key = ("parameters", tensor, shards)
        return self.once(key, lambda: self._prefix(lambda part: part.padded_on_rank(tensor, shards)))

    def largest_block(self, tensor: int, shards: int = 1) -> float:
        """Returns the elements of the largest block on a rank; padded, as it travels, for more than one shard."""
        key = ("largest", tensor, shards)
        return self.once(key, lambda: max(part.padded_on_rank(tensor, shards) for part in self.kinds))

    def kept_prefix(self, tensor: int, sequence_parallel: bool, kind: str) -> list[float]:
        """Sums over the blocks of what a sample keeps for its backward, in 16 bit."""
        written = not self.software.fused_attention and kind == "none"
        of_attention = kind == "selective" and self.software.selective == "attention"

        def kept(part: Part) -> float:
            live = part.keeps("none" if of_attention else kind).on_rank(tensor, sequence_parallel)
            return live + (part.scores / tensor if written else 0.0)

        return self.once(("kept", tensor, sequence_parallel, kind), lambda: self._prefix(kept))

    def parameters(self, mesh: MeshShape, kind: Kind) -> tuple[float, float]:
        """Returns the elements on a pipeline rank, as they are and padded for the shards."""
        tensor = mesh.tensor_parallel_size
        shards = mesh.shards if mesh.zero_stage and self.software.shards_by_unit else 1
        plain = kind.sum(self.parameter_prefix(tensor, 1)) + self.ends(tensor, 1, kind)
        if shards == 1:
            return plain, plain
        return plain, kind.sum(self.parameter_prefix(tensor, shards)) + self.ends(tensor, shards, kind)

    def ends(self, tensor: int, shards: int, kind: Kind) -> float:
        """Returns the elements of what lies beside the blocks, padded for the shards."""
        there = ((self.model.first, kind.has_first), (self.model.last, kind.has_last))
        tied = self.model.shared_parameters / tensor if kind.has_first and kind.has_last else 0.0
        return self.once(
            ("ends", tensor, shards, kind.has_first, kind.has_last),
            lambda: sum(part.padded_on_rank(tensor, shards) for part, has in there if has) - tied,
        )

    def _prefix(self, size: Callable[[Part], float]) -> list[float]:
        """Sums over the blocks; equal blocks are the same object."""
        sizes = {part: size(part) for part in self.kinds}
        return list(accumulate((sizes[part] for part in self.blocks), initial=0.0))
