"""When a rank computed what: timestamps around the computations of its stages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_3d.parallel.pipeline.schedule.actions import Action
from lightning_3d.parallel.pipeline.schedule.timeline import Event


class Stopwatch:
    """Takes the time of computations while it runs; what it does not see costs nothing.

    On an accelerator the times are those of the current stream, so that nothing waits for them.

    Args:
        device: Where the stages compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero: _Mark | None = None
        self._taken: list[tuple[Action, _Mark, _Mark]] = []

    def start(self) -> None:
        """Begins anew; the times are counted from here."""
        self._taken.clear()
        self._zero = _Mark(self._device)

    def stop(self, rank: int) -> tuple[Event, ...]:
        """Returns what was taken since the start.

        Args:
            rank: The pipeline rank whose computations these are.
        """
        assert self._zero is not None, "the stopwatch does not run"
        zero, self._zero = self._zero, None
        taken, self._taken = self._taken, []
        return tuple(Event(rank, action, zero.until(first), zero.until(last)) for action, first, last in taken)

    @contextmanager
    def over(self, action: Action) -> Iterator[None]:
        """Takes the time of a computation."""
        if self._zero is None:
            yield
            return
        first = _Mark(self._device)
        yield
        self._taken.append((action, first, _Mark(self._device)))


class _Mark:
    """A moment of the host's clock, or of the current stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.Event | None = None
        if device.type != "cpu":
            self._event = torch.Event(device, enable_timing=True)
            self._event.record()
        self._seconds = time.perf_counter()

    def until(self, later: _Mark) -> float:
        """Returns the seconds from here to a later moment."""
        if self._event is None or later._event is None:
            return later._seconds - self._seconds
        later._event.synchronize()
        return self._event.elapsed_time(later._event) / 1000
