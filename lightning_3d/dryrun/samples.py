"""What is alive at some moments of a step, for a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_3d.counters import Category, LiveBytes
from lightning_3d.dryrun.report import Sample


class Sampler:
    """Inside ``with``, looks at what is alive at equal distances.

    How many operations a step has is known at its end alone: whenever there are twice as many samples as asked for,
    every other one goes and the distance doubles.

    Attributes:
        samples: What was seen, between ``count`` and twice as many once there were so many operations.

    Args:
        live: What is alive.
        owners: What each storage is for.
        count: How many samples; 0 for none.
    """

    def __init__(self, live: LiveBytes, owners: Callable[[], Mapping[int, Category]], count: int) -> None:
        self.samples: list[Sample] = []
        self._live = live
        self._owners = owners
        self._count = count
        self._operations = 0
        self._distance = 1

    def __enter__(self) -> None:
        if self._count:
            self._live.follow(self._step)

    def __exit__(self, *exception: Any) -> None:
        self._live.follow(None)

    def _step(self) -> None:
        self._operations += 1
        if self._operations % self._distance:
            return
        found = self._live.by_category(self._owners())
        self.samples.append(Sample(operation=self._operations, phase=self._live.running, categories=found))
        if len(self.samples) == 2 * self._count:
            self.samples = self.samples[1::2]
            self._distance *= 2
