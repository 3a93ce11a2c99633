"""All blocks of a module that are replayed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn

from lightning_3d.graph.calls import Call
from lightning_3d.parallel.tensor.replay.block import BlockReport, Replay, ReplayOptions
from lightning_3d.parallel.tensor.replay.program import Bodies, Read
from lightning_3d.shards.group import ShardGroup


class Replays:
    """Replays the blocks of a module.

    Args:
        blocks: By name.
        group: The tensor axis.
        read: Returns the plain local leaf of a parameter.
        options: How they are replayed.
        kept: Modules inside blocks that always run as they are, such as regions of experts.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        group: ShardGroup,
        *,
        read: Read,
        options: ReplayOptions | None = None,
        kept: Collection[nn.Module] = (),
    ) -> None:
        bodies = Bodies()
        self._replays = {
            name: Replay(block, group, read=read, name=name, options=options, bodies=bodies, kept=kept)
            for name, block in blocks.items()
        }

    def handler(self, name: str) -> Callable[[Call], Any]:
        """Returns what handles calls of a block's ``forward``."""
        return self._replays[name].handle

    def flush(self) -> None:
        """Forgets all recordings: at the beginning of a fit."""
        for replay in self._replays.values():
            replay.flush()

    def reports(self) -> tuple[BlockReport, ...]:
        """Returns what became of each block."""
        return tuple(replay.report() for replay in self._replays.values())
