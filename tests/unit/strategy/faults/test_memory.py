"""What is said where memory is not enough."""

from __future__ import annotations

import pytest
import torch

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.strategy.faults.memory import is_out_of_memory, memory_hint


def test_errors_that_come_from_it_are_known() -> None:
    caused = RuntimeError("the step failed")
    caused.__cause__ = torch.OutOfMemoryError("no memory")
    for error in (MemoryError(), torch.OutOfMemoryError(), caused):
        assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("no such parameter"))


def test_torch_says_it_of_the_host_as_expected() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_the_values_are_those_of_the_run_and_what_helps_no_more_is_left_out() -> None:
    spec = MeshSpec.resolve(8, data="auto", pipeline=2, tensor=1)
    hint = memory_hint(StrategyConfig(micro_batch_size=4, pipeline_parallel_size=2), spec)
    *steps, last = hint.splitlines()[1:]
    assert last.startswith("  6. `lightning-3d plan`")
    assert steps == [
        "  1. micro_batch_size=2, now 4",
        "  2. activation_checkpointing='selective', then 'full', now 'none'",
        "  3. zero_stage=2, up to 3, now 1 over 4 data ranks",
        "  4. tensor_parallel_size=2, now 1",
        "  5. pipeline_parallel_size=4, now 2",
    ]
    alone = MeshSpec.resolve(1)
    hint = memory_hint(StrategyConfig(micro_batch_size=1, zero_stage=3, activation_checkpointing="full"), alone)
    assert hint.splitlines()[1:-1] == [
        "  1. tensor_parallel_size=2, now 1, with more devices",
        "  2. pipeline_parallel_size=2, now 1, with more devices",
    ]


@pytest.mark.parametrize(
    ("options", "pipeline", "text"),
    [
        ({"num_microbatches": 3}, 1, "num_microbatches=6, now 3"),
        ({}, 1, "num_microbatches=2 or more, now 1"),
        ({}, 2, "micro_batch_size=1, now as large as 8 micro-batches need"),
    ],
)
def test_fewer_samples_at_once_come_first(options: dict[str, int], pipeline: int, text: str) -> None:
    spec = MeshSpec.resolve(pipeline, pipeline=pipeline)
    assert memory_hint(StrategyConfig(**options), spec).splitlines()[1] == f"  1. {text}"  # type: ignore[arg-type]
