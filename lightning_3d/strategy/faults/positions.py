"""Where a run is, and what its ranks say when one of them has ended it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from lightning.pytorch import Trainer

from lightning_3d.errors import Lightning3DError
from lightning_3d.faults.report import Fault, add_note, is_consequence, traceback_of


class Doing:
    """What a rank does beside the loops of its Trainer, for those who ask where it is."""

    def __init__(self) -> None:
        self._what: list[str] = []

    @contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        """Inside, this is what the rank does."""
        self._what.append(what)
        try:
            yield
        finally:
            self._what.pop()

    def position(self, trainer: Trainer) -> str:
        """Returns where a rank is, as "saving a checkpoint in training, epoch 1, batch 7, step 19"."""
        return " in ".join([*self._what[-1:], position_of(trainer)])


Method = TypeVar("Method", bound=Callable[..., Any])


def during(what: str) -> Callable[[Method], Method]:
    """Has a method of a strategy tell that this is what its rank does."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def doing(self: Any, *args: Any, **options: Any) -> Any:
            with self._doing(what):
                return method(self, *args, **options)

        return cast("Method", doing)

    return decorate


def position_of(trainer: Trainer) -> str:
    """Returns where a Trainer is, as "training, epoch 1, batch 7, step 19"; read beside a running Trainer too."""
    stage, loop = trainer.state.stage, trainer._active_loop
    if stage is None or loop is None:
        return "setup"
    doing = "validation before training" if trainer.sanity_checking else {"train": "training"}.get(stage.value, stage)
    progress: Any = getattr(loop, "epoch_loop", loop)
    batch = max(progress.batch_progress.current.ready - 1, 0)
    return f"{doing}, epoch {trainer.current_epoch}, batch {batch}, step {trainer.global_step}"


def tell_first(error: BaseException, fault: Fault | None, rank: int) -> None:
    """Has the rank that was the first to fail say so before the others, and these add to their error which one it was.

    Args:
        error: This rank's.
        fault: What has begun the end of the job, if that is known.
        rank: This rank.
    """
    if fault is None:
        return
    if fault.rank == rank and not is_consequence(error):
        # The library's own are short and raised on all ranks alike, and an exit is no error.
        if isinstance(error, Exception) and not isinstance(error, Lightning3DError):
            sys.stderr.write(f"{fault.headline}\n{traceback_of(error)}")
            sys.stderr.flush()
    elif is_consequence(error):
        add_note(error, str(fault))
