"""Batches of changing sizes and lengths through a pipeline: no gradient is lost, no sample dropped, whatever comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from tests.marks import more
from tests.parity.models import LENGTH, VOCABULARY, NextToken
from tests.spmd.fits import loader
from tests.spmd.tensor_runs import Ranks, seen_alike

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]

# Samples and length of each batch: shapes that come again, and batches that do not split evenly.
SHAPES = ((8, 12), (7, 8), (8, 10), (8, 12), (5, 6), (8, 12), (3, 12), (1, 9))


class Lengths(NextToken):
    """A small decoder, and steps that log."""

    def __init__(self, dropout: float) -> None:
        from lightning_3d.reference.gpt import GPT

        super().__init__(
            GPT(vocab_size=VOCABULARY, hidden_size=16, num_layers=4, num_heads=2, max_length=LENGTH, dropout=dropout)
        )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


def batches() -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [(torch.randint(0, VOCABULARY, shape, generator=generator),) for shape in SHAPES]


def lengths(ranks: Ranks, dropout: float = 0.1) -> Any:
    module = Lengths(dropout)
    strategy = {"num_microbatches": 4} if ranks.world == 1 else None
    return ranks.fit(
        module,
        loader(batches()),
        loader(batches()[:3]),
        strategy=strategy,
        accumulate_grad_batches=3,
        gradient_clip_val=0.5,
        val_check_interval=2,
        use_distributed_sampler=False,
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved1f1b", "zbvzerobubble"])
def test_shapes_that_change(schedule: str) -> None:
    seen_alike(lengths, 2, **_options(schedule))


@pytest.mark.parametrize(
    ("schedule", "zero"), [("1f1b", 1), more("interleaved1f1b", 2), more("zbvzerobubble", 3), more("1f1b", 0)]
)
def test_shapes_that_change_beside_the_data_axis(schedule: str, zero: int) -> None:
    # Both data ranks see the same batches, so that their mean is one device's.
    seen_alike(without_dropout, 4, timeout=90, zero_stage=zero, **_options(schedule))


def without_dropout(ranks: Ranks) -> Any:
    return lengths(ranks, dropout=0.0)


def _options(schedule: str) -> dict[str, Any]:
    return {
        "pipeline_parallel_size": 2,
        "tensor_parallel_size": 1,
        "pipeline_schedule": schedule,
        "num_microbatches": 4,
    }


def test_torch_still_has_what_is_overridden() -> None:
    assert callable(getattr(PipelineStage, "_post_metadata_inference_cleanup", None))
