"""The rows of the pipeline axis, alone and with the others: each runs a model in stages, in one device's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_3d.config.schema import SCHEDULES
from tests.parity.pipeline_models import PIPELINE_MODELS, TRANSFORMERS
from tests.parity.table import Reference

MAIN_SCHEDULES = ("1f1b", "interleaved1f1b", "zbvzerobubble")
CUBE = (
    "HF Llama, 8 blocks",
    "HF GPT-2 (tied), 8 blocks",
    "HF BERT for masked tokens, 8 blocks",
    "reference GPT, 8 blocks",
)
WITH_EXPERTS = "HF Mixtral, router losses, 8 blocks"


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRow:
    """One row.

    Attributes:
        model: Name in ``PIPELINE_MODELS``.
        pipeline: Pipeline degree.
        schedule: ``pipeline_schedule``.
        data: Data degree.
        tensor: Tensor degree.
        zero: ZeRO stage.
        sequence: With sequence parallelism.
        recompute: ``activation_checkpointing``.
        accumulate: ``accumulate_grad_batches``.
        precision: Name of the precision.
        microbatches: Micro-batches of each data rank's batch.
        compile: With compiled blocks.
    """

    model: str
    pipeline: int
    schedule: str = "1f1b"
    data: int = 1
    tensor: int = 1
    zero: int = 1
    sequence: bool = False
    recompute: str = "none"
    accumulate: int = 1
    precision: str = "64-true"
    microbatches: int = 4
    compile: bool = False

    @property
    def world(self) -> int:
        """Processes."""
        return self.pipeline * self.data * self.tensor

    @property
    def strategy(self) -> dict[str, object]:
        """Arguments of the strategy; on the tensor axis dropout draws the masks of one device."""
        return {
            "pipeline_parallel_size": self.pipeline,
            "tensor_parallel_size": self.tensor,
            "zero_stage": self.zero,
            "pipeline_schedule": self.schedule,
            "sequence_parallel": self.sequence,
            "activation_checkpointing": self.recompute,
            "num_microbatches": self.microbatches,
            "compile": self.compile,
            "tensor_random": "exact",
        }

    @property
    def reference(self) -> Reference:
        """What the row is compared with."""
        return Reference.of(self)

    @property
    def mesh(self) -> str:
        """The mesh in words."""
        data = f" x data {self.data}, zero {self.zero}" if self.data > 1 else ""
        return f"pipeline {self.pipeline}" + (f" x tensor {self.tensor}" if self.tensor > 1 else "") + data

    @property
    def options(self) -> str:
        """What is on beside the mesh."""
        found = [self.schedule]
        found += [name for name in ("sequence", "compile") if getattr(self, name)]
        found += [] if self.recompute == "none" else [f"recompute {self.recompute}"]
        found += [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        found += [f"microbatches {self.microbatches}"] if self.microbatches != 4 else []
        return ", ".join(found)

    def __str__(self) -> str:
        return f"{self.model}, {self.mesh}, {self.precision}, {self.options}"


def all_pipeline_rows() -> Iterator[PipelineRow]:
    """Every row, references of one model together."""
    for model in PIPELINE_MODELS:
        for pipeline in (2, 4):
            for schedule in SCHEDULES:
                yield PipelineRow(model=model, pipeline=pipeline, schedule=schedule)
        yield PipelineRow(model=model, pipeline=2, microbatches=1)
        yield PipelineRow(model=model, pipeline=2, precision="bf16-mixed")
        if model in TRANSFORMERS:
            yield from _with_data(model)
            yield from _with_tensor(model)
        if model in CUBE:
            for schedule in MAIN_SCHEDULES:
                for zero in (1, 3):
                    yield PipelineRow(model=model, pipeline=2, schedule=schedule, data=2, tensor=2, zero=zero)
    yield from _compiled()


def _compiled() -> Iterator[PipelineRow]:
    for schedule in MAIN_SCHEDULES:
        for tensor in (1, 2):
            yield PipelineRow(model=CUBE[3], pipeline=2, schedule=schedule, tensor=tensor, compile=True)
    yield PipelineRow(model=CUBE[3], pipeline=2, data=2, zero=3, compile=True)


def _with_data(model: str) -> Iterator[PipelineRow]:
    for schedule in MAIN_SCHEDULES:
        for zero in (0, 1, 2, 3):
            yield PipelineRow(model=model, pipeline=2, schedule=schedule, data=2, zero=zero)
    for zero in (0, 1, 2):
        yield PipelineRow(model=model, pipeline=2, data=2, zero=zero, recompute="full")
    yield PipelineRow(model=model, pipeline=2, data=2, zero=1, accumulate=4)
    yield PipelineRow(model=model, pipeline=2, data=2, zero=3, precision="bf16-master")


def _with_tensor(model: str) -> Iterator[PipelineRow]:
    for schedule in MAIN_SCHEDULES:
        for sequence in (False, True) if model != WITH_EXPERTS else (False,):
            for recompute in ("none", "full"):
                yield PipelineRow(
                    model=model, pipeline=2, schedule=schedule, tensor=2, sequence=sequence, recompute=recompute
                )


def quick_pipeline_rows() -> Iterator[PipelineRow]:
    """A named subset with every model, schedule, mesh and option at least once."""
    for index, model in enumerate(PIPELINE_MODELS):
        yield PipelineRow(model=model, pipeline=2, schedule=SCHEDULES[index % len(SCHEDULES)])
    for schedule in MAIN_SCHEDULES:
        yield PipelineRow(model="HF GPT-2 (tied), 8 blocks", pipeline=4, schedule=schedule)
    for index, (model, zero) in enumerate(zip(TRANSFORMERS, (0, 1, 2, 3, 0, 1, 2, 3, 1), strict=True)):
        yield PipelineRow(model=model, pipeline=2, schedule=MAIN_SCHEDULES[index % 3], data=2, zero=zero)
    for index, model in enumerate(CUBE):
        yield PipelineRow(
            model=model,
            pipeline=2,
            schedule=MAIN_SCHEDULES[index % 3],
            tensor=2,
            sequence=index % 2 == 0,
            recompute=("none", "full", "selective", "none")[index],
        )
    yield PipelineRow(model=CUBE[1], pipeline=2, data=2, tensor=2, zero=1)
    yield PipelineRow(model=CUBE[0], pipeline=2, schedule="zbvzerobubble", data=2, tensor=2, zero=3, sequence=True)
    yield PipelineRow(model=CUBE[3], pipeline=2, data=2, zero=1, accumulate=4)
    yield PipelineRow(model=CUBE[3], pipeline=2, precision="bf16-mixed")
