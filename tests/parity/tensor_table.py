"""The rows of the tensor axis: each cuts a model's layers, alone or beside the data axis, in one device's numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.parity.table import Reference
from tests.parity.tensor_models import TENSOR_MODELS, WITH_EXPERTS

# Tensor degree, data degree, ZeRO stage.
MESHES = ((2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 2, 3), (4, 2, 1), (4, 2, 3))
# Models whose blocks compile: they fill no key-value cache and drop nothing that is cut.
COMPILED = ("packed GPT (tied)", "reference Llama", "HF GPT-NeoX")
# Models with dropout inside their blocks, which has to come out the same when it is computed again.
RECOMPUTED = ("HF Llama (GQA)", "HF GPT-2 (eager)", "packed GPT (tied)", "nn.TransformerEncoder")
SEQUENCE_MESHES = ((2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 2, 3))


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRow:
    """One row.

    Attributes:
        model: Name in ``TENSOR_MODELS``.
        tensor: Tensor degree.
        data: Data degree.
        zero: ZeRO stage.
        sequence: With sequence parallelism.
        compile: With compiled blocks.
        accumulate: ``accumulate_grad_batches``.
        precision: Name of the precision.
        microbatches: Micro-batches of each rank's batch.
        replay: Blocks are recorded and replayed.
        recompute: ``activation_checkpointing``.
    """

    model: str
    tensor: int
    data: int = 1
    zero: int = 1
    sequence: bool = False
    compile: bool = False
    accumulate: int = 1
    precision: str = "64-true"
    microbatches: int = 1
    replay: bool = True
    recompute: str = "none"

    @property
    def world(self) -> int:
        """Processes."""
        return self.tensor * self.data

    @property
    def strategy(self) -> dict[str, object]:
        """Arguments of the strategy; dropout draws the masks of one device."""
        return {
            "tensor_parallel_size": self.tensor,
            "zero_stage": self.zero,
            "sequence_parallel": self.sequence,
            "compile": self.compile,
            "num_microbatches": self.microbatches,
            "tensor_random": "exact",
            "replay": self.replay,
            "activation_checkpointing": self.recompute,
        }

    @property
    def reference(self) -> Reference:
        """What the row is compared with."""
        return Reference.of(self)

    @property
    def mesh(self) -> str:
        """The mesh in words."""
        return f"tensor {self.tensor}" + (f" x data {self.data}, zero {self.zero}" if self.data > 1 else "")

    @property
    def options(self) -> str:
        """What is on beside the mesh."""
        found = [name for name in ("sequence", "compile") if getattr(self, name)]
        found += [] if self.replay else ["no replay"]
        found += [] if self.recompute == "none" else [f"recompute {self.recompute}"]
        found += [f"accumulate {self.accumulate}"] if self.accumulate > 1 else []
        found += [f"microbatches {self.microbatches}"] if self.microbatches > 1 else []
        return ", ".join(found)

    def __str__(self) -> str:
        options = f", {self.options}" if self.options else ""
        return f"{self.model}, {self.mesh}, {self.precision}{options}"


def all_tensor_rows() -> Iterator[TensorRow]:
    """Every row, references of one model together."""
    for model in TENSOR_MODELS:
        for tensor, data, zero in MESHES:
            yield TensorRow(model=model, tensor=tensor, data=data, zero=zero)
        if model not in WITH_EXPERTS:
            for tensor, data, zero in SEQUENCE_MESHES:
                yield TensorRow(model=model, tensor=tensor, data=data, zero=zero, sequence=True)
        yield TensorRow(model=model, tensor=2, precision="bf16-mixed")
    for model in ("HF Llama (GQA)", "packed GPT (tied)"):
        yield TensorRow(model=model, tensor=2, replay=False)
        for zero in (0, 2):
            yield TensorRow(model=model, tensor=2, data=2, zero=zero)
        for zero in (1, 3):
            yield TensorRow(model=model, tensor=2, data=2, zero=zero, accumulate=4, microbatches=2)
        yield TensorRow(model=model, tensor=2, data=2, zero=3, precision="bf16-master")
    for model in RECOMPUTED:
        for kind in ("selective", "full"):
            yield TensorRow(model=model, tensor=2, recompute=kind)
            yield TensorRow(model=model, tensor=2, data=2, zero=3, sequence=True, recompute=kind)
    for model in COMPILED:
        yield TensorRow(model=model, tensor=2, compile=True)
    for kind in ("selective", "full"):
        yield TensorRow(model=COMPILED[0], tensor=2, data=2, zero=3, compile=True, recompute=kind)


def quick_tensor_rows() -> Iterator[TensorRow]:
    """A named subset with every model, mesh size and option at least once."""
    for index, model in enumerate(TENSOR_MODELS):
        tensor, data, zero = ((2, 1, 1), (2, 2, 1), (2, 2, 3), (4, 1, 1))[index % 4]
        yield TensorRow(model=model, tensor=tensor, data=data, zero=zero)
    for model in ("HF Llama (GQA)", "packed GPT (tied)", "HF BERT"):
        yield TensorRow(model=model, tensor=2, data=2, zero=3, sequence=True)
    yield TensorRow(model="packed GPT (tied)", tensor=2, data=2, zero=1, accumulate=4, microbatches=2)
    yield TensorRow(model=COMPILED[0], tensor=2, compile=True)
    yield TensorRow(model="HF GPT-2 (sdpa)", tensor=2, replay=False)
    for model, kind in zip(RECOMPUTED, ("selective", "full", "full", "selective"), strict=True):
        yield TensorRow(model=model, tensor=2, recompute=kind)
    yield TensorRow(model="reference GPT", tensor=2, precision="bf16-mixed")
