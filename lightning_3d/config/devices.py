"""How many processes a configuration asks for, and how many the degrees of its mesh need at least."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import ConfigError


def asked_devices(devices: object) -> int | None:
    """Returns how many processes on a node ``trainer.devices`` asks for; None for one on each device that is there.

    Args:
        devices: The option, in any form that Lightning takes.

    Raises:
        ConfigError: It is in no such form.
    """
    if devices in ("auto", -1, "-1"):
        return None
    words = str(devices).strip(", ").split(",")
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        count = len(devices)
    elif all(word.strip().isdigit() for word in words):
        count = int(words[0]) if len(words) == 1 else len(words)
    else:
        count = 0
    if count == 0:
        raise ConfigError(
            f"trainer.devices={devices!s} names no device",
            valid="a number of at least 1, a list of device numbers, or auto",
            fix="trainer.devices=2",
        )
    return count


def smallest_world(options: StrategyConfig, shards: int = 1) -> int:
    """Returns how many processes the degrees of a mesh need at least.

    Args:
        options: The strategy's options.
        shards: Data ranks of each replica where the degree of the data axis is "auto".
    """
    data = options.data_parallel_size
    ranks = data if isinstance(data, int) else shards * options.data_replicate_size
    return ranks * options.pipeline_parallel_size * options.tensor_parallel_size
