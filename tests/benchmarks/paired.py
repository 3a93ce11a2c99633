"""Two training loops in one process that take turns step by step, so that both meet the same noise."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback


class Turns:
    """Lets two threads run one step each, in turn, and times the steps.

    Args:
        steps: Steps that each of them runs.
        warm_up: First steps that are not counted.
    """

    def __init__(self, steps: int, warm_up: int) -> None:
        self.steps = steps
        self._warm_up = warm_up
        self._whose = threading.Condition()
        self._turn = 0
        self._done: set[int] = set()
        self._error: BaseException | None = None
        self.wall: tuple[list[float], list[float]] = ([], [])
        self.cpu: tuple[list[float], list[float]] = ([], [])
        self._start: list[tuple[float, float] | None] = [None, None]

    def run(self, loops: tuple[Callable[[Side], None], Callable[[Side], None]]) -> None:
        """Runs both loops to their end."""
        threads = [threading.Thread(target=self._side, args=(index, loop)) for index, loop in enumerate(loops)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _side(self, index: int, loop: Callable[[Side], None]) -> None:
        self._wait(index)
        try:
            loop(Side(self, index))
        except BaseException as error:
            self._error = error
        finally:
            with self._whose:
                self._done.add(index)
                self._turn = 1 - index
                self._whose.notify_all()

    def step_ended(self, index: int) -> None:
        """Takes the time of a step, and gives the turn away until it comes back."""
        now = (time.perf_counter(), time.process_time())
        start = self._start[index]
        if start is not None:
            self.wall[index].append(now[0] - start[0])
            self.cpu[index].append(now[1] - start[1])
        with self._whose:
            if 1 - index not in self._done:
                self._turn = 1 - index
                self._whose.notify_all()
        self._wait(index)
        self._start[index] = (time.perf_counter(), time.process_time())

    def _wait(self, index: int) -> None:
        with self._whose:
            self._whose.wait_for(lambda: self._turn == index or 1 - index in self._done)

    def times(self) -> list[tuple[float, float, float, float]]:
        """Returns wall and CPU seconds of both sides, step by step, without the warm-up."""
        rows = list(zip(self.wall[0], self.wall[1], self.cpu[0], self.cpu[1], strict=False))
        return rows[self._warm_up :]


@dataclass(frozen=True)
class Side:
    """One of the two loops' view of the turns."""

    turns: Turns
    index: int

    def step_ended(self) -> None:
        """Called by a hand-written loop after each step."""
        self.turns.step_ended(self.index)

    def callback(self) -> Callback:
        """Returns a callback that ends the turn after each batch of a Trainer."""
        return _EndsTurn(self)


class _EndsTurn(Callback):
    def __init__(self, side: Side) -> None:
        self._side = side

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._side.step_ended()


@dataclass(frozen=True)
class Comparison:
    """Times of our side and of the other, step by step.

    Attributes:
        title: What is compared.
        target: The ratio of wall times to reach.
        rows: Wall seconds (ours, theirs) and CPU seconds (ours, theirs) of each pair.
    """

    title: str
    target: float
    rows: list[tuple[float, float, float, float]] = field(repr=False)

    def line(self) -> str:
        """Returns a row of a Markdown table."""
        ours = statistics.median(row[0] for row in self.rows) * 1e3
        theirs = statistics.median(row[1] for row in self.rows) * 1e3
        wall = statistics.quantiles([row[0] / row[1] for row in self.rows], n=4)
        cpu = statistics.quantiles([row[2] / row[3] for row in self.rows], n=4)
        met = "yes" if wall[0] <= self.target else "no"
        return (
            f"| {self.title} | {ours:.1f} | {theirs:.1f} | {wall[0]:.3f} / {wall[1]:.3f} / {wall[2]:.3f} | "
            f"{cpu[0]:.3f} / {cpu[1]:.3f} / {cpu[2]:.3f} | {self.target:.2f} | {met} |"
        )


HEADER = (
    "| comparison | ours, ms | theirs, ms | wall ratio (quartiles) | CPU ratio (quartiles) | target | met |\n"
    "|---|---|---|---|---|---|---|"
)
