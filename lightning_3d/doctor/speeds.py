"""What was measured of the devices and of the mesh: values, as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_3d.units import format_bytes, format_flops, format_seconds
from lightning_3d.wire import wire_factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """One operation over one axis, on all groups of the axis at the same time.

    Attributes:
        operation: ``all_reduce``, ``all_gather``, ``reduce_scatter`` or ``send``.
        axis: Name of the mesh axis.
        ranks: Ranks of a group.
        payload: Bytes of the whole tensor.
        seconds: Median of the repeats, of the slowest rank.
    """

    operation: str
    axis: str
    ranks: int
    payload: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second that a rank sends, in a ring."""
        return self.payload * wire_factor(self.operation, self.ranks) / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What one device does while all others of the node do the same.

    Attributes:
        name: What it is.
        memory: Bytes that it has; of a host, the share of a process.
        memory_bandwidth: Bytes per second that a copy reads and writes.
        matmul_flops: Operations per second of a large product, by "fp32" and "bf16".
    """

    name: str
    memory: float
    memory_bandwidth: float
    matmul_flops: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Everything that was measured.

    Attributes:
        mesh: The mesh, as text.
        backend: What the processes talked through.
        device: The slowest device.
        speeds: Axis by axis, operation by operation, size by size.
    """

    mesh: str
    backend: str
    device: Device
    speeds: tuple[Speed, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes that were measured."""
        return tuple(dict.fromkeys(speed.axis for speed in self.speeds))

    def latency(self, axis: str) -> float:
        """Returns the seconds of an all-gather of the smallest tensor."""
        return min((each.payload, each.seconds) for each in self._of(axis, "all_gather"))[1]

    def bandwidth(self, axis: str) -> float:
        """Returns the bytes per second that a rank sends in an all-reduce of the largest tensor."""
        return max((each.payload, each.bandwidth) for each in self._of(axis, "all_reduce"))[1]

    def __str__(self) -> str:
        flops = ", ".join(f"{name} {format_flops(value)}" for name, value in self.device.matmul_flops.items())
        lines = [
            f"measured on {self.mesh}, {self.backend}",
            f"device     {self.device.name}, {format_bytes(self.device.memory)} of memory",
            f"products   {flops}",
            f"copies     {format_bytes(self.device.memory_bandwidth)}/s read and written",
        ]
        if not self.speeds:
            return "\n".join([*lines, "collectives: none, there is one process"])
        # Sizes are rounded to what the ranks of an axis divide.
        sizes = sorted(speed.payload for speed in self._of(self.axes[0], self.speeds[0].operation))
        head = "".join(f"{format_bytes(size):>24}" for size in sizes)
        lines += ["", f"{'axis':<18} {'operation':<15} {'ranks':>5}{head}"]
        for axis in self.axes:
            for operation in dict.fromkeys(speed.operation for speed in self.speeds):
                row = sorted(self._of(axis, operation), key=lambda speed: speed.payload)
                cells = "".join(f"{_cell(speed):>24}" for speed in row)
                lines.append(f"{axis:<18} {operation:<15} {row[0].ranks:>5}{cells}")
        return "\n".join(lines)

    def _of(self, axis: str, operation: str) -> list[Speed]:
        return [speed for speed in self.speeds if (speed.axis, speed.operation) == (axis, operation)]


def _cell(speed: Speed) -> str:
    return f"{format_seconds(speed.seconds)}, {format_bytes(speed.bandwidth)}/s"
