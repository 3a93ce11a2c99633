"""The rows of the proof: each is one mesh that must train a model with the numbers of one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from tests.parity.models import MODELS

ZERO = {"0": 2, "1": 2, "2": 2, "3": 2, "hybrid 2x2": 4}
ACCUMULATE = (1, 4)
PRECISIONS = ("64-true", "bf16-mixed", "bf16-master", "16-mixed")
STEPS = 5
# Accumulating 4: four whole windows and a short one of two batches.
BATCHES = {1: STEPS, 4: 18}
SAMPLES_PER_RANK = 2
# Models with repeated blocks and dropout inside them, which has to come out the same when it is computed again.
RECOMPUTED = ("HF Llama", "HF GPT-2 (tied)", "nn.TransformerEncoder")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row.

    Attributes:
        model: Name in ``MODELS``.
        zero: Name in ``ZERO``.
        accumulate: ``accumulate_grad_batches``.
        precision: Name of the precision.
        microbatches: Micro-batches of each rank's batch.
        recompute: ``activation_checkpointing``.
    """

    model: str
    zero: str
    accumulate: int
    precision: str
    microbatches: int = 1
    recompute: str = "none"

    tensor: ClassVar[int] = 1

    @property
    def data(self) -> int:
        """Data ranks of the mesh."""
        return ZERO[self.zero]

    @property
    def world(self) -> int:
        """Processes."""
        return self.data

    @property
    def strategy(self) -> dict[str, object]:
        """Arguments of the strategy for the mesh."""
        hybrid = self.zero.startswith("hybrid")
        options: dict[str, object] = {
            "zero_stage": 2 if hybrid else int(self.zero),
            "data_replicate_size": 2 if hybrid else 1,
            "activation_checkpointing": self.recompute,
        }
        return options | ({"num_microbatches": self.microbatches} if self.microbatches > 1 else {})

    @property
    def reference(self) -> Reference:
        """What the row is compared with."""
        return Reference.of(self)

    @property
    def mesh(self) -> str:
        """The mesh in words."""
        return f"data {self.data}, zero {self.zero}"

    @property
    def options(self) -> str:
        """What is on beside the mesh."""
        found = [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        found += [f"microbatches {self.microbatches}"] if self.microbatches > 1 else []
        found += [] if self.recompute == "none" else [f"recompute {self.recompute}"]
        return ", ".join(found)

    def __str__(self) -> str:
        micro = f" microbatches {self.microbatches}" if self.microbatches > 1 else ""
        recompute = "" if self.recompute == "none" else f" recompute {self.recompute}"
        return f"{self.model}, zero {self.zero}, accumulate {self.accumulate}, {self.precision}{micro}{recompute}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """One process with all degrees 1 and the same global micro-batches."""

    model: str
    accumulate: int
    precision: str
    data: int
    microbatches: int
    tensor: ClassVar[int] = 1

    @classmethod
    def of(cls, row: Any) -> Reference:
        """Returns what a row of any axis is compared with."""
        return cls(
            model=row.model,
            accumulate=row.accumulate,
            precision=row.precision,
            data=row.data,
            microbatches=row.microbatches,
        )

    @property
    def strategy(self) -> dict[str, object]:
        """Arguments of the strategy: as many micro-batches as the mesh has in all."""
        return {"num_microbatches": self.data * self.microbatches}

    def in_fp32(self) -> Reference:
        """The same run in fp32, to measure how far the precision itself is off."""
        return replace(self, precision="32-true")


def all_rows() -> Iterator[Row]:
    """Every row, references of one model together."""
    for model in MODELS:
        for accumulate in ACCUMULATE:
            for precision in PRECISIONS:
                for zero in ZERO:
                    yield Row(model=model, zero=zero, accumulate=accumulate, precision=precision)
        yield Row(model=model, zero="0", accumulate=4, precision="64-true", microbatches=2)
        yield Row(model=model, zero="1", accumulate=4, precision="64-true", microbatches=2)
        yield Row(model=model, zero="2", accumulate=1, precision="64-true", microbatches=2)
        yield Row(model=model, zero="3", accumulate=4, precision="64-true", microbatches=2)
        for recompute in ("selective", "full") if model in RECOMPUTED else ():
            for zero in ZERO:
                yield Row(model=model, zero=zero, accumulate=1, precision="64-true", recompute=recompute)
            yield Row(model=model, zero="3", accumulate=4, precision="64-true", microbatches=2, recompute=recompute)


def quick_rows() -> Iterator[Row]:
    """A named subset with every model, stage, precision and accumulation at least once."""
    models = list(MODELS)
    stages = list(ZERO)
    for index, model in enumerate(models):
        yield Row(model=model, zero=stages[index % 5], accumulate=ACCUMULATE[index % 2], precision="64-true")
        precision = PRECISIONS[1 + index % 3]
        yield Row(
            model=model, zero=stages[(index + 3) % 4], accumulate=ACCUMULATE[(index + 1) % 2], precision=precision
        )
    for zero in ("0", "1", "2", "3"):
        yield Row(model="HF GPT-2 (tied)", zero=zero, accumulate=4, precision="64-true", microbatches=2)
    for model, zero, recompute in zip(RECOMPUTED, ("3", "0", "2"), ("full", "selective", "full"), strict=True):
        yield Row(model=model, zero=zero, accumulate=1, precision="64-true", recompute=recompute)
