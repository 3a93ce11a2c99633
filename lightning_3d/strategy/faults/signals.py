"""SIGTERM and the signal of a scheduler that requeues: heard by any rank, answered by all after the same batch.

Lightning answers them in the handler itself, with collectives in the middle of whatever the rank is doing.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_3d.log import get_logger

_log = get_logger(__name__)

END, REQUEUE = "end", "requeue"
WISHES = (END, REQUEUE)
# How checkpoints are called that a signal has asked for, before the number of the step.
AT_SIGNAL = "sigterm-step="


def path_at_signal(trainer: Trainer) -> Path | None:
    """Returns where to save when a signal ends a training; None if a callback saves then, or nothing is trained.

    It is where ModelCheckpoint saves, or the Trainer's own directory.
    """
    if trainer.state.fn != TrainerFn.FITTING or trainer.sanity_checking or not trainer.global_step:
        return None
    savers = trainer.checkpoint_callbacks
    if any(isinstance(each, OnExceptionCheckpoint) or getattr(each, "save_on_exception", False) for each in savers):
        return None
    directories = [directory for each in savers if (directory := getattr(each, "dirpath", None)) is not None]
    return Path(directories[0] if directories else trainer.default_root_dir) / f"{AT_SIGNAL}{trainer.global_step}.ckpt"


class SignalsOfAll:
    """What signals ask of the ranks of a run.

    Attributes:
        asked: How many signals of each kind this rank has heard and not yet told the others, in the order of `WISHES`.
        heard: What any rank was asked, to be answered after this batch.
    """

    def __init__(self) -> None:
        self.asked = [0.0] * len(WISHES)
        self.heard: set[str] = set()

    def listen(self, trainer: Trainer) -> None:
        """Takes the place of Lightning's handlers until the Trainer puts back those of before."""
        connector = trainer._signal_connector
        if not connector._original_handlers:
            return
        environment = trainer._accelerator_connector.cluster_environment
        requeue: Any = signal.SIGUSR1
        if isinstance(environment, SLURMEnvironment):
            requeue = environment.requeue_signal
        for number, wish, own in (
            (signal.SIGTERM, END, connector._sigterm_notifier_fn),
            (requeue, REQUEUE, connector._slurm_sigusr_handler_fn),
        ):
            handlers = getattr(signal.getsignal(number), "signal_handlers", [])
            if own in handlers:
                others = [each for each in handlers if each != own and callable(each)]
                connector._register_signal(number, self._asking(wish, others))

    def tell(self) -> list[float]:
        """Returns what this rank was asked since it was told last."""
        asked, self.asked = self.asked, [0.0] * len(WISHES)
        return asked

    def learn(self, counts: list[int]) -> None:
        """Notes what all ranks together were asked."""
        self.heard.update(wish for wish, count in zip(WISHES, counts, strict=True) if count)

    def answer(self, trainer: Trainer) -> None:
        """Does what was asked; every rank calls it after the same batch."""
        heard, self.heard = self.heard, set()
        if REQUEUE in heard:
            trainer._signal_connector._slurm_sigusr_handler_fn(signal.SIGUSR1, None)  # type: ignore[arg-type]
        if END in heard:
            trainer._signal_connector.received_sigterm = True

    def _asking(self, wish: str, others: list[Any]) -> Callable[[int, FrameType | None], None]:
        index = WISHES.index(wish)

        def handler(number: int, frame: FrameType | None) -> None:
            _log.info("%s: all ranks %s after this batch", signal.Signals(number).name, wish)
            self.asked[index] += 1
            for other in others:
                other(number, frame)

        return handler
