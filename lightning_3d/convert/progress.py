"""How far a conversion is, for who waits in front of a terminal."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_3d.checkpoint.sources import TensorSource


class Progress:
    """A bar of the bytes that were read; only on a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None

    def begin(self, total: int) -> None:
        """Shows an empty bar.

        Args:
            total: Bytes to read.
        """
        self._bar = tqdm(total=total, unit="B", unit_scale=True, disable=None, leave=False, desc="convert")

    def add(self, nbytes: int) -> None:
        """Moves the bar on."""
        if self._bar is not None:
            self._bar.update(nbytes)

    def end(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.close()


class Counted(TensorSource):
    """A source that tells how much of it has been read.

    Args:
        source: The source.
        progress: Is told.
    """

    def __init__(self, source: TensorSource, progress: Progress) -> None:
        self.path, self.forms, self.ties = source.path, source.forms, source.ties
        self._source, self._progress = source, progress

    def read(self, into: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
        """See the base class."""
        self._source.read(into, group)
        self._progress.add(sum(tensor.nbytes for tensor in into.values()))
