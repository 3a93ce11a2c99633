"""When a rank computed what: timestamps around the computations of its stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from lightning_3d.parallel.pipeline.schedule.actions import Action
from lightning_3d.parallel.pipeline.schedule.timeline import Event


class Stopwatch:
    """Takes the time of computations while it runs; what it does not see costs nothing.

    Times are those of the machine's clock, so that those of several ranks can be compared. On an accelerator they are
    the times of the current stream, so that nothing waits for them.

    Args:
        device: Where the stages compute.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Somebody else who wants to know what is computed.
        self.beside: Callable[[Action], AbstractContextManager[None]] = _nobody
        self._zero: _Mark | None = None
        self._taken: list[tuple[Action, _Mark, _Mark]] = []

    def start(self) -> None:
        """Begins anew."""
        self._taken.clear()
        self._zero = _Mark(self._device, wait=True)

    def stop(self, rank: int) -> tuple[Event, ...]:
        """Returns what was taken since the start.

        Args:
            rank: The pipeline rank whose computations these are.
        """
        assert self._zero is not None, "the stopwatch does not run"
        zero, self._zero = self._zero, None
        taken, self._taken = self._taken, []
        return tuple(Event(rank, action, first.since(zero), last.since(zero)) for action, first, last in taken)

    @contextmanager
    def over(self, action: Action) -> Iterator[None]:
        """Takes the time of a computation."""
        with self.beside(action):
            if self._zero is None:
                yield
                return
            first = _Mark(self._device)
            yield
            self._taken.append((action, first, _Mark(self._device)))


def _nobody(action: Action) -> AbstractContextManager[None]:
    return nullcontext()


class _Mark:
    """A moment of the host, or of the current stream of an accelerator."""

    def __init__(self, device: torch.device, *, wait: bool = False) -> None:
        self._event: torch.Event | None = None
        if device.type != "cpu":
            self._event = torch.Event(device, enable_timing=True)
            self._event.record()
            if wait:
                self._event.synchronize()
        self._seconds = time.time()

    def since(self, zero: _Mark) -> float:
        """Returns the moment in seconds of the machine's clock, which the stream's zero was held against."""
        if self._event is None or zero._event is None:
            return self._seconds
        self._event.synchronize()
        return zero._seconds + zero._event.elapsed_time(self._event) / 1000
