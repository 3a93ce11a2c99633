"""Logging for many processes: every rank may speak; what all of them would say, rank 0 says alone."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# From here on a person wonders what is going on.
SLOW_SECONDS = 2.0
_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


def get_logger(name: str) -> logging.Logger:
    """Returns the logger of a module; its records carry no handler of ours, so applications stay in charge."""
    return logging.getLogger(name)


def process_rank() -> int:
    """Returns this process' rank: as a strategy has set it, before that as the launcher did; 0 when alone."""
    # Variables of a launcher begin anew on each node, or are those of the process that a strategy has started others
    # from. Lightning is not imported for this.
    known = sys.modules.get("lightning_utilities.core.rank_zero")
    rank = 0 if known is None else int(getattr(known.rank_zero_only, "rank", 0))
    values = (os.environ.get(variable, "") for variable in _RANK_VARIABLES)
    return rank or next((int(value) for value in values if value.isdigit()), 0)


def info_on_first_rank(logger: logging.Logger, message: str) -> None:
    """Logs ``message`` at level INFO on rank 0 alone."""
    if process_rank() == 0:
        logger.info(message)


@contextmanager
def told_if_slow(what: str, tell: Callable[[str], object], *, after: float = SLOW_SECONDS) -> Iterator[None]:
    """Says what is going on once it has taken a while, and how long it took; nothing if it is quick.

    Args:
        what: What is done inside, as the start of a sentence.
        tell: Is given a line; it may be called on another thread.
        after: Seconds until something is said.
    """
    begin = time.monotonic()
    timer = threading.Timer(after, tell, args=(f"{what} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
    seconds = time.monotonic() - begin
    if seconds >= after:
        tell(f"{what} took {seconds:.1f} s")
