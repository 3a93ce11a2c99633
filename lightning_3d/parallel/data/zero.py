"""ZeRO stages as settings of FSDP2: when a unit gathers, reduces and lets go.

Stages after Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5.
All of them shard parameters, gradients and optimizer state between optimizer steps; they differ in what stays whole
inside a step of several micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardSettings:
    """What the next backward does to a unit.

    Attributes:
        reduce_scatter: Reduce the gradients over the shards.
        all_reduce: Reduce them over the replicas as well (hybrid sharding).
        reshard: Let the gathered parameters go.
    """

    reduce_scatter: bool
    all_reduce: bool
    reshard: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroStage:
    """One ZeRO stage.

    Attributes:
        stage: 0 to 3.
    """

    stage: int

    @property
    def reshard_blocks_after_forward(self) -> bool:
        """Whether blocks let their parameters go between forward and backward."""
        return self.stage == 3

    def blocks(self, *, last: bool) -> BackwardSettings:
        """Returns the settings of block units for a backward.

        Args:
            last: It is the last backward before the optimizer step.
        """
        return BackwardSettings(
            reduce_scatter=last or self.stage >= 2,
            all_reduce=last,
            reshard=last or self.stage == 3,
        )

    def root(self, *, last: bool) -> BackwardSettings:
        """Returns the settings of the root unit for a backward.

        The root is gathered once per optimizer step at every stage: it is in use from the first to the last operation
        of each micro-batch, so letting it go in between would lower no peak and cost one gather per micro-batch.
        """
        return BackwardSettings(reduce_scatter=last or self.stage >= 2, all_reduce=last, reshard=last)
