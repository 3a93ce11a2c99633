"""Steps that ask for what exists only after planning: they are planned all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.models import NextToken
from tests.parity.tensor_models import PackedGPT
from tests.spmd.fits import loader
from tests.spmd.tensor_runs import Ranks, seen_alike, tokens

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(120)]


class LogsRates(NextToken):
    """Logs learning rates in every way that steps do."""

    def __init__(self) -> None:
        super().__init__(PackedGPT())
        for block in self.model.blocks:
            block.mlp[3].p = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        scheduler: Any = self.lr_schedulers()
        self.log("of the optimizer", optimizer.param_groups[0]["lr"])
        self.log("of the Trainer", self.trainer.optimizers[0].param_groups[-1]["lr"])
        self.log("of the scheduler", scheduler.get_last_lr()[0])
        self.log("optimizers", len(self.trainer.optimizers))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


def rates(ranks: Ranks) -> Any:
    module = LogsRates()
    record = ranks.fit(module, loader(tokens(3)), use_distributed_sampler=False)
    return record, {name: float(value) for name, value in module.trainer.callback_metrics.items()}


@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_learning_rates_are_logged_by_the_step(axis: str) -> None:
    options = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2} if axis == "pipeline" else {}
    seen_alike(rates, 2, **options)
