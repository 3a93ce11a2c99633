"""A sweeper that chooses by itself: another process that swept too would choose something else."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore


@dataclass
class RandomSweeperConf:
    _target_: str = "hydra_plugins.random_sweeper.RandomSweeper"
    key: str = "lr"


ConfigStore.instance().store(group="hydra/sweeper", name="random", node=RandomSweeperConf, provider="digits")


class RandomSweeper(BasicSweeper):
    """Sets one key at random for all jobs, and writes down what the jobs return."""

    def __init__(self, key: str) -> None:
        super().__init__(max_batch_size=None)
        self.key = key

    def sweep(self, arguments: list[str]) -> Any:
        value = random.SystemRandom().uniform(0.01, 0.03)
        batches = super().sweep([*arguments, f"{self.key}={value}"])
        returned = [job.return_value for batch in batches for job in batch]
        Path(self.config.hydra.sweep.dir, "returned.json").write_text(json.dumps(returned))
        return batches
