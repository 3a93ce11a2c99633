"""What is predicted for one mesh, as figures and as text."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from lightning_3d.planner.shapes import BatchShape, MeshShape
from lightning_3d.units import format_seconds

ESTIMATE = "estimate, not measured"
# Nine of ten published figures of memory lie within this share of the prediction.
MEMORY_BAND = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Figures by name that add up."""

    @property
    def total(self) -> float:
        """The sum."""
        # The slots of a class are its fields; a search asks for this often.
        names: tuple[str, ...] = self.__slots__
        return float(sum([getattr(self, name) for name in names]))

    def by_name(self) -> dict[str, float]:
        """Returns the figures with their names as people read them."""
        return {one.name.replace("_", " "): getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryParts(Parts):
    """Bytes on the rank that holds most, at its worst moment.

    Attributes:
        parameters: Weights that are there all the time.
        gathered_parameters: Whole weights of the units at work.
        gradients: As they wait for the optimizer, and those of the unit that reduces, unless ``logits`` are larger.
        optimizer: The optimizer's state, master weights included.
        activations: Of all micro-batches in flight, from forward to backward.
        recomputed: Of the block that is computed again.
        logits: Scores over the vocabulary and what the loss makes of them; 0 where a block's backward takes more,
            since they are not there at the same time.
        communication_buffers: In which the pipeline axis receives.
        padding: Rows that the data axis adds so that its shards are equal.
    """

    parameters: float = 0.0
    gathered_parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    recomputed: float = 0.0
    logits: float = 0.0
    communication_buffers: float = 0.0
    padding: float = 0.0

    @property
    def states(self) -> float:
        """Bytes of weights, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeParts(Parts):
    """Seconds of a step, on the rank that computes longest.

    Attributes:
        compute: Forwards and backwards.
        recompute: Computing again what was not kept.
        bubble: Waiting for other stages.
        tensor: Waiting for the tensor axis.
        pipeline: Sending between stages.
        data: Gathers and reductions of the data axis that no computation hides.
        optimizer: The optimizer's step.
        fixed: What every step takes.
    """

    compute: float = 0.0
    recompute: float = 0.0
    bubble: float = 0.0
    tensor: float = 0.0
    pipeline: float = 0.0
    data: float = 0.0
    optimizer: float = 0.0
    fixed: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Memory and time of a training step; an estimate, not a measurement.

    Attributes:
        mesh: The mesh.
        batch: The batch.
        microbatches: Micro-batches of a data rank, those that the schedule adds included.
        pipeline_schedule: The schedule.
        activation_checkpointing: What is computed again.
        bytes_recipe: Name of the recipe of bytes.
        cluster: Name of the cluster.
        memory: Bytes by kind.
        memory_rank: Pipeline rank that holds them.
        needed_bytes: What a device must have: allocated bytes, fragmentation, the driver's own.
        capacity: What a device has.
        time: Seconds by part.
        hidden_data_seconds: Communication of the data axis beside computation.
        in_flight: Micro-batches that the rank holding most memory keeps at a time, in whole ranks.
        model_flops: Operations of the model in a step, nothing counted twice.
        hardware_flops: The same with what is computed again.
        peak_flops: Operations per second of all devices.
        time_band: Share by which the time may be off.
        time_scale: What all times were multiplied with: measured over predicted steps, 1 without a measurement.
    """

    mesh: MeshShape
    batch: BatchShape
    microbatches: int
    pipeline_schedule: str
    activation_checkpointing: str
    bytes_recipe: str
    cluster: str
    memory: MemoryParts
    memory_rank: int
    needed_bytes: float
    capacity: float
    time: TimeParts
    hidden_data_seconds: float
    in_flight: float
    model_flops: float
    hardware_flops: float
    peak_flops: float
    time_band: float
    time_scale: float = 1.0

    def scaled(self, factor: float) -> Prediction:
        """Returns the same with all times multiplied."""
        times = TimeParts(**{one.name: factor * getattr(self.time, one.name) for one in fields(self.time)})
        return replace(
            self,
            time=times,
            hidden_data_seconds=factor * self.hidden_data_seconds,
            time_scale=factor * self.time_scale,
        )

    @property
    def allocated_bytes(self) -> float:
        """Bytes of tensors on the rank that holds most, at its worst moment."""
        return self.memory.total

    @property
    def step_seconds(self) -> float:
        """Seconds of an optimizer step."""
        return self.time.total

    @property
    def tflops_per_device(self) -> float:
        """Operations of the model, in units of 1e12 per second and device; nothing is counted twice."""
        return self.model_flops / self.step_seconds / self.mesh.devices / 1e12

    @property
    def hardware_tflops_per_device(self) -> float:
        """The same with what is computed again."""
        return self.hardware_flops / self.step_seconds / self.mesh.devices / 1e12

    @property
    def mfu(self) -> float:
        """Operations of the model over those that the devices could do: model FLOPs utilisation."""
        return self.model_flops / self.step_seconds / self.peak_flops

    @property
    def bubble_fraction(self) -> float:
        """Share of a pipeline's duration in which a rank waits for other stages: (p - 1) / (m + p - 1) in 1F1B."""
        time = self.time
        busy = time.compute + time.recompute + time.tensor + time.pipeline
        return time.bubble / (busy + time.bubble) if time.bubble else 0.0

    @property
    def fits(self) -> bool:
        """Whether a device has what is needed."""
        return self.needed_bytes <= self.capacity

    @property
    def is_borderline(self) -> bool:
        """Whether what is needed is so close to what there is that nobody can tell."""
        return abs(self.needed_bytes / self.capacity - 1) <= _BORDER

    @property
    def verdict(self) -> str:
        """Whether it fits, with the number that decides."""
        left = self.capacity - self.needed_bytes
        text = f"fits, {left / 1e9:.1f} GB left" if left >= 0 else f"does not fit, {-left / 1e9:.1f} GB too much"
        return f"{text} (borderline)" if self.is_borderline else text

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as plain containers."""
        mesh = {one.name: getattr(self.mesh, one.name) for one in fields(self.mesh)}
        return {
            "estimate": ESTIMATE,
            "mesh": mesh,
            "batch": {"global_size": self.batch.global_size, "micro_size": self.batch.micro_size},
            "microbatches": self.microbatches,
            "pipeline_schedule": self.pipeline_schedule,
            "activation_checkpointing": self.activation_checkpointing,
            "bytes_recipe": self.bytes_recipe,
            "cluster": self.cluster,
            "allocated_bytes": self.allocated_bytes,
            "needed_bytes": self.needed_bytes,
            "capacity_bytes": self.capacity,
            "fits": self.fits,
            "borderline": self.is_borderline,
            "memory_bytes": self.memory.by_name(),
            "memory_rank": self.memory_rank,
            "in_flight": self.in_flight,
            "memory_band": MEMORY_BAND,
            "step_seconds": self.step_seconds,
            "time_seconds": self.time.by_name(),
            "hidden_data_seconds": self.hidden_data_seconds,
            "time_band": self.time_band,
            "time_scale": self.time_scale,
            "bubble_fraction": self.bubble_fraction,
            "tflops_per_device": self.tflops_per_device,
            "hardware_tflops_per_device": self.hardware_tflops_per_device,
            "mfu": self.mfu,
        }

    def __str__(self) -> str:
        head = (
            f"{self.mesh}\n  micro-batches of {self.batch.micro_size} x {self.microbatches}, {self.pipeline_schedule}, "
            f"activation checkpointing {self.activation_checkpointing}, {self.bytes_recipe}   [{ESTIMATE}]"
        )
        size, unit = (1e9, "GB") if self.allocated_bytes >= 1e9 else (1e6, "MB")
        memory = {name: count / size for name, count in self.memory.by_name().items() if count >= 0.05 * size}
        kinds = ", ".join(f"{name} {count:.1f}" for name, count in memory.items())
        on_rank = f" on pipeline rank {self.memory_rank}, {self.in_flight:.3g} micro-batches in flight"
        where = on_rank if self.mesh.pipeline_parallel_size > 1 else ""
        speed = self.tflops_per_device
        rate = f"{speed:.1f} TFLOP/s" if speed >= 0.1 else f"{speed * 1e3:.1f} GFLOP/s"
        parts = ", ".join(
            f"{name} {format_seconds(seconds)} ({seconds / self.step_seconds:.0%})"
            for name, seconds in self.time.by_name().items()
            if seconds >= 0.001 * self.step_seconds
        )
        scale = f" x {self.time_scale:.3g} by cluster.time_scale" if self.time_scale != 1 else ""
        hidden = f"; hidden: data {format_seconds(self.hidden_data_seconds)}" if self.hidden_data_seconds else ""
        return (
            f"{head}\n"
            f"  memory {self.allocated_bytes / size:.1f} {unit} allocated, {self.needed_bytes / 1e9:.1f} GB needed of "
            f"{self.capacity / 1e9:.0f} (± {MEMORY_BAND:.0%}): {self.verdict}\n    {unit}{where}: {kinds}\n"
            f"  step {format_seconds(self.step_seconds)} (± {self.time_band:.0%}{scale}), "
            f"{rate} per device, MFU {self.mfu:.1%}, bubble {self.bubble_fraction:.1%}\n"
            f"    {parts}{hidden}"
        )


# Outside of this share around a device's memory the verdict is right in nine of ten published cases.
_BORDER = 0.08
