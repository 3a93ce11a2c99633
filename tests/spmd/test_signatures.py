"""Steps that take the batch alone, as Lightning allows, train and evaluate as those that take its index too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.parity.catalog import build, global_batches
from tests.parity.measure import whole
from tests.parity.models import NextToken
from tests.spmd.fits import loader, share, trainer
from tests.spmd.pool import run_spmd

MODEL, SAMPLES, BATCHES = "HF GPT-2 (tied)", 8, 5


class WithIndex(NextToken):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


class BatchAlone(NextToken):
    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


def fit(rank: int, world: int, options: dict[str, Any]) -> list[tuple[dict[str, Tensor], float]]:
    found = []
    for kind in (WithIndex, BatchAlone):
        torch.manual_seed(0)
        module = kind(build(MODEL).model)
        data = [share(batch, rank, world) for batch in global_batches(MODEL, BATCHES, SAMPLES)]
        run = trainer(world, strategy=options, max_epochs=1, accumulate_grad_batches=2, use_distributed_sampler=False)
        # The second rank has one batch less to validate.
        run.fit(module, loader(data), loader(data[: 3 - rank]))
        found.append((whole(dict(module.named_parameters())), float(run.callback_metrics["val_loss"])))
    return found


@pytest.mark.spmd
@pytest.mark.parametrize("options", [{"zero_stage": 0, "num_microbatches": 2}, {"zero_stage": 3}], ids=str)
def test_a_step_need_not_take_the_index(options: dict[str, Any]) -> None:
    for (expected, expected_loss), (found, loss) in run_spmd(fit, 2, options):
        assert loss == expected_loss
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
