"""What the agent of torchrun is told of the end of a process, so that its summary names what has begun it.

Without a record it names the process that was the first to end, which often has only waited for another one.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from lightning_3d.faults.report import Fault


class OtherRankError(RuntimeError):
    """Another rank has ended the job."""


def tell_agent(error: BaseException) -> None:
    """Has the agent know why this process ends, where there is one and where it was told nothing yet.

    Args:
        error: Why. One that asks the process to end, as SIGTERM does, is no failure.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or Path(path).exists() or not isinstance(error, Exception):
        return
    # A process that ends does so also where its last words find no place.
    with suppress(OSError):
        get_error_handler().record_exception(error)


def tell_agent_of(fault: Fault) -> None:
    """Has the agent know what has ended the job, from a rank that has only met the end of it."""
    tell_agent(OtherRankError(str(fault)))
