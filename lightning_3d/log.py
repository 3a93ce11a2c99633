"""Logging for many processes: one logger per module, spoken by rank 0 unless asked otherwise."""

from __future__ import annotations

import logging
import os

_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


def get_logger(name: str) -> logging.Logger:
    """Returns the logger of a module; its records carry no handler of ours, so applications stay in charge."""
    return logging.getLogger(name)


def process_rank() -> int:
    """Returns this process' rank as the launcher set it, before any process group exists; 0 when alone."""
    for variable in _RANK_VARIABLES:
        value = os.environ.get(variable)
        if value is not None and value.isdigit():
            return int(value)
    return 0


def info_once(logger: logging.Logger, message: str) -> None:
    """Logs ``message`` at level INFO on rank 0 alone."""
    if process_rank() == 0:
        logger.info(message)
