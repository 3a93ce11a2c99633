"""How long computing a part and sending its results takes, on one rank.

Products: operations over the peak, times the share that products of this width and height reach. Everything between
them: bytes through the device's memory. Collectives: rings, by the slowest level that the group crosses.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from lightning_3d.planner.cluster import Cluster
from lightning_3d.planner.constants import A100_BALANCE, Constants
from lightning_3d.planner.model import Bytes, Part
from lightning_3d.planner.recipes import ByteRecipe
from lightning_3d.planner.software import Software

# Backward of what is bound by memory reads the gradients too.
_BACKWARD_MEMORY = 1.2
# An embedding reads and writes rows, forward and backward.
_EMBEDDING_PASSES = 6.0


@dataclass(frozen=True, slots=True)
class PartTimes:
    """Seconds of one micro-batch on one rank.

    Attributes:
        forward: Of the forward.
        backward: Of the backward, with what is computed again in it.
        again: Of that, what is computed again.
        tensor: Of both, waiting for the tensor axis, without what is computed again.
    """

    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0
    tensor: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that communicate.

    Attributes:
        size: How many.
        stride: How far neighbours are apart in ranks.
    """

    size: int
    stride: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Times on one cluster.

    Attributes:
        cluster: The cluster.
        recipe: Bytes of what is computed and sent.
        software: What runs.
        constants: What the formulas leave open.
    """

    cluster: Cluster
    recipe: ByteRecipe
    software: Software
    constants: Constants
    peak: float = field(init=False)
    balance: float = field(init=False)

    def __post_init__(self) -> None:
        peak = self.cluster.flops(self.recipe.computed)
        object.__setattr__(self, "peak", peak)
        object.__setattr__(self, "balance", peak / self.cluster.memory_bandwidth / A100_BALANCE)

    def part(self, part: Part, *, samples: int, tensor: Group, sequence_parallel: bool, kind: str) -> PartTimes:
        """Returns the times of one part.

        Args:
            part: The part.
            samples: Of the micro-batch.
            tensor: The tensor axis.
            sequence_parallel: The sequence is cut between the parts that the tensor axis cuts.
            kind: Of activation checkpointing.
        """
        constants, size = self.constants, tensor.size
        # The head is cut along the vocabulary, so its products stay as wide as the state.
        rate = self._product_rate(part.width / (1 if part.logits else size), part.rows * samples)
        operations = samples / size / rate
        matmul = part.matmul_flops * operations
        if self.software.float8:
            matmul /= constants.float8_speed
        attention = part.attention_flops * operations * self._attention_factor(part)
        moved = self._through_memory(part, samples, size, sequence_parallel)
        sums = self.sums(part, samples, tensor)
        launch = constants.block_seconds if part.is_block else 0.0
        forward = matmul + attention + moved + sums + launch
        again = 0.0
        if part.is_block and kind == "full":
            # Computing again ends before the block's last sum.
            again = forward - (sums / part.sums if part.sums else 0.0)
        elif part.is_block and kind == "selective":
            again = attention + (
                part.again_flops * operations + moved
                if self.software.selective == "products"
                else self._scores(part, samples, size)
            )
        backward = 2 * (matmul + attention) + _BACKWARD_MEMORY * moved + sums + launch + again
        return PartTimes(forward, backward, again, 2 * sums)

    def sums(self, part: Part, samples: int, tensor: Group) -> float:
        """Returns the seconds of a part's sums over the tensor axis in a forward."""
        if tensor.size == 1 or not part.sums:
            return 0.0
        payload = part.state * samples * self.recipe.computed / 2
        share = 2 * (tensor.size - 1) / tensor.size
        seconds = part.sums * (share * payload / self.bandwidth(tensor) + 2 * self._start(tensor))
        return seconds * (self.constants.exposed if self.software.overlaps_tensor else 1.0)

    def bandwidth(self, group: Group) -> float:
        """Returns the bytes per second that each rank of a group sends in a ring."""
        constants, found, below = self.constants, float("inf"), 1
        for index, level in enumerate(self.cluster.levels):
            share = constants.outer_share if index else constants.inner_share
            found = min(found, level.bandwidth * share * below**constants.members_power)
            if level.devices is None or (group.size - 1) * group.stride < level.devices:
                break
            below = max(1, min(group.size, level.devices // group.stride))
        return found

    def ring(self, group: Group, payload: float, passes: int = 1) -> float:
        """Returns the seconds of a collective.

        Args:
            group: Its ranks.
            payload: Bytes of the whole.
            passes: How often a ring passes it on: 1 for a gather or a scatter, 2 for an all-reduce.
        """
        if group.size == 1 or not payload:
            return 0.0
        sent = passes * (group.size - 1) / group.size * payload
        return sent / self.bandwidth(group) + passes * self._start(group)

    def send(self, payload: float, group: Group, *, in_a_circle: bool = False) -> float:
        """Returns what sending to the next rank of a pipeline adds to a micro-batch, in one direction.

        Rank r of p has p - r micro-batches on their way in 1F1B, and each of them passes all links behind r before its
        backward comes back: so each costs a share of 1 / (p - r) of these links, at the rank where that is most.

        Args:
            payload: Bytes.
            group: The pipeline axis.
            in_a_circle: Several stages on each rank: the last rank sends to the first, and so many micro-batches are
                on their way that each costs what a link takes on average.
        """
        inside = self.cluster.levels[0].devices
        near, far = self._link(payload, 0), self._link(payload, min(1, len(self.cluster.levels) - 1))
        ranks, stride = group.size, group.stride
        if inside is None or stride * ranks <= inside:
            crossing = [False] * (ranks - 1)
        else:
            nodes = [rank * stride // inside for rank in range(ranks)]
            crossing = [one != other for one, other in pairwise(nodes)]
        if in_a_circle:
            links = [*crossing, any(crossing)]
            return near + (far - near) * sum(links) / len(links)
        most = behind = 0.0
        for rank in reversed(range(ranks - 1)):
            behind += far if crossing[rank] else near
            most = max(most, behind / (ranks - rank))
        return most

    def hidden(self, seconds: float, beside: float) -> float:
        """Returns what is left of communication that runs beside a computation.

        Args:
            seconds: Of the communication.
            beside: Of the computation.
        """
        if not self.software.overlaps_data:
            return seconds
        share = self.constants.exposed
        return max(share * seconds, seconds - (1 - share) * beside)

    def _link(self, payload: float, index: int) -> float:
        """Seconds of sending over one link of a level."""
        constants, level = self.constants, self.cluster.levels[index]
        share = constants.outer_share if index else constants.inner_share
        bandwidth = min(level.bandwidth * share, constants.pair_bandwidth)
        return payload / bandwidth + 2 * constants.collective_seconds

    def _product_rate(self, width: float, rows: float) -> float:
        constants = self.constants
        wide = width / (width + constants.half_width * self.balance)
        high = rows / (rows + constants.half_rows * self.balance)
        return self.peak * self.cluster.matmul_efficiency * wide * high

    def _attention_factor(self, part: Part) -> float:
        if self.software.fused_attention:
            return self.constants.attention_slowdown * (0.5 if part.causal else 1.0)
        return self.constants.odd_heads if part.head_size % 8 else 1.0

    def _through_memory(self, part: Part, samples: int, tensor: int, sequence_parallel: bool) -> float:
        """Seconds of a forward for everything that is not a product."""
        width = self.recipe.computed / 2
        if part.logits:
            moved = part.logits * self.software.logit_bytes * width / tensor
        elif part.is_block:
            kept = part.kept.get("none", Bytes())
            moved = kept.on_rank(tensor, sequence_parallel)
            if not self.software.fused_attention:
                moved += part.scores / tensor
            moved *= self.constants.memory_passes * width
        else:
            moved = _EMBEDDING_PASSES * part.state * width
        return samples * moved / self.cluster.memory_bandwidth

    def _scores(self, part: Part, samples: int, tensor: int) -> float:
        if self.software.fused_attention:
            return 0.0
        moved = self.constants.memory_passes * part.scores * samples / tensor * self.recipe.computed / 2
        return moved / self.cluster.memory_bandwidth

    def _start(self, group: Group) -> float:
        """Latency of a ring: its start, by the device or by the slower link, and each node that it crosses."""
        inside = max(1, min(group.size, self.cluster.devices_per_node // group.stride))
        started = max(self.constants.collective_seconds, self.cluster.levels[0].latency)
        return started + self.cluster.levels[-1].latency * (-(-group.size // inside) - 1)
