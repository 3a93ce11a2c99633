"""Start, memory and collectives of each way to train the same model: `python -m tests.benchmarks.costs`.

Two processes train a few steps of a small GPT in each way. The start is the time from the call until the first step is
over, in processes that have imported everything. Bytes are what torch's CPU allocator had given out at the worst
moment, and collectives are what torch's profiler sees of gloo in one of the later steps; both are equal in every run.
DeepSpeed sends some of its own by shared memory, which is not gloo. Prints a Markdown table; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from lightning_3d import Mesh3DStrategy
from tests.benchmarks.data_axis import other
from tests.benchmarks.loops import CLIP, Loop, Size, has_deepspeed, trainer_loop
from tests.benchmarks.paired import Side, Turns
from tests.spmd.pool import run_spmd

SIZE, STEPS, WORLD = Size(), 5, 2
_BYTES = {"float": 4, "double": 8, "long int": 8, "int": 4, "unsigned char": 1, "c10::BFloat16": 2, "bool": 1}

WAYS = {
    "Mesh3DStrategy(zero_stage=0)": 0,
    "Lightning's DDPStrategy": "ddp",
    "hand-written DistributedDataParallel loop": "ddp_by_hand",
    "Mesh3DStrategy(zero_stage=1)": 1,
    "DeepSpeed stage 1": "deepspeed1",
    "Mesh3DStrategy(zero_stage=2)": 2,
    "DeepSpeed stage 2": "deepspeed2",
    "Mesh3DStrategy(zero_stage=3)": 3,
    "Lightning's FSDPStrategy": "fsdp",
    "Lightning's ModelParallelStrategy": "model_parallel",
    "hand-written FSDP2 loop": "fsdp2_by_hand",
    "DeepSpeed stage 3": "deepspeed3",
}


@dataclass(frozen=True)
class Costs:
    """What a run cost on the first rank.

    Attributes:
        peak: Bytes at the worst moment.
        calls: Collectives of one step.
        sent: Bytes handed to them.
    """

    peak: int
    calls: int
    sent: int


class _Alone(Turns):
    """Runs one loop alone, times its first step and looks at its last one with a profiler."""

    def __init__(self, last_step: profile | None = None) -> None:
        super().__init__(STEPS, 0)
        self.first = 0.0
        self._steps = 0
        self._last_step = last_step

    def step_ended(self, index: int) -> None:
        self._steps += 1
        if self._steps == 1:
            self.first = time.perf_counter()
        if self._last_step is not None and self._steps == STEPS - 1:
            self._last_step.start()
        if self._last_step is not None and self._steps == STEPS:
            self._last_step.stop()


def loop_of(way: int | str, rank: int) -> Loop:
    """Returns the loop of one way to train."""
    if isinstance(way, int):
        return trainer_loop(Mesh3DStrategy(zero_stage=way), rank, WORLD, SIZE, clip=CLIP)
    return other(way, rank, WORLD, SIZE)


def start(rank: int, world: int, way: int | str) -> float:
    """Returns the seconds until the first step is over."""
    dist.barrier()
    alone, begin = _Alone(), time.perf_counter()
    loop_of(way, rank)(Side(alone, 0))
    return alone.first - begin


def costs(rank: int, world: int, way: int | str) -> Costs:
    """Trains twice under torch's profiler, for memory and for collectives: with shapes it would hold on to tensors."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
        loop_of(way, rank)(Side(_Alone(), 0))
    step = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
    loop_of(way, rank)(Side(_Alone(step), 0))
    allocations = sorted((event for event in _events(memory) if event.get("name") == "[memory]"), key=lambda e: e["ts"])
    totals = [event["args"]["Total Allocated"] for event in allocations]
    # The counter goes on from earlier profiles of this process, of which it has not heard what was freed after them.
    before = totals[0] - allocations[0]["args"]["Bytes"]
    sums = [event["args"] for event in _events(step) if str(event.get("name")).startswith("gloo:")]
    return Costs(max(totals) - before, len(sums), sum(map(_size, sums)))


def _events(seen: profile) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
        return events


def _size(arguments: dict[str, Any]) -> int:
    shapes, types = arguments.get("Input Dims", []), arguments.get("Input type", [])
    return sum(_bytes(shape, kind) for shape, kind in zip(shapes, types, strict=True))


def _bytes(shape: Any, kind: str) -> int:
    if shape and isinstance(shape[0], list):
        return sum(_bytes(each, kind) for each in shape)
    return math.prod(shape) * _BYTES.get(kind, 0) if shape else 0


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="starts of each way; the median is shown")
    options = parser.parse_args()
    ways = {title: way for title, way in WAYS.items() if has_deepspeed() or not str(way).startswith("deepspeed")}
    print("| | start, s | peak, MiB | collectives a step | bytes handed to them, MiB |\n|---|---|---|---|---|")
    # DeepSpeed comes last: what it leaves in a process is in the way of others.
    for title, way in sorted(ways.items(), key=lambda item: str(item[1]).startswith("deepspeed")):
        # The first start imports.
        seconds = [run_spmd(start, WORLD, way, timeout=300)[0] for _ in range(options.repeats + 1)][1:]
        found = run_spmd(costs, WORLD, way, timeout=300)[0]
        sent = f"{found.sent / 2**20:.2f}" if found.calls else "not seen"
        print(
            f"| {title} | {statistics.median(seconds):.2f} | {found.peak / 2**20:.1f} "
            f"| {found.calls or 'not seen'} | {sent} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
