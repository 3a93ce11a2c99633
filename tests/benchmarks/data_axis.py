"""Step times of the data axis beside what people use today: `python -m tests.benchmarks.data_axis`.

Two processes (one for the single-device pair); in each, the two loops take turns step by step. Both sides train the
same model on the same batches with AdamW and clipping by norm. For ranks of one machine DeepSpeed builds collectives of
its own, through shared memory; all others use gloo. Prints a Markdown table; asserts nothing.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn

from lightning_3d import Mesh3DStrategy
from tests.benchmarks.loops import (
    CLIP,
    Loop,
    Size,
    ddp,
    deepspeed_loop,
    fsdp2,
    hand_loop,
    has_deepspeed,
    trainer_loop,
)
from tests.benchmarks.paired import HEADER, Comparison, Turns
from tests.spmd.lightning_sharded import CpuFSDP
from tests.spmd.pool import run_spmd

WARM_UP = 10
SIZE = Size()


@dataclass(frozen=True)
class Pair:
    """Two ways to train the same model.

    Attributes:
        title: What is compared.
        world: Processes.
        ours: Arguments of Mesh3DStrategy.
        target: The ratio of wall times to reach.
        clip: The norm that both sides clip by; None where the other side cannot.
    """

    title: str
    world: int
    ours: dict[str, Any]
    target: float
    clip: float | None = CLIP


PAIRS = {
    "ddp": Pair("zero_stage=0, Lightning's DDPStrategy", 2, {"zero_stage": 0}, 1.00),
    "ddp_by_hand": Pair("zero_stage=0, hand-written DistributedDataParallel loop", 2, {"zero_stage": 0}, 1.03),
    "fsdp": Pair("zero_stage=3, Lightning's FSDPStrategy, no clipping", 2, {"zero_stage": 3}, 1.00, clip=None),
    "model_parallel": Pair(
        "zero_stage=3, Lightning's ModelParallelStrategy, hand-written plan", 2, {"zero_stage": 3}, 1.00
    ),
    "fsdp2_by_hand": Pair("zero_stage=3, hand-written FSDP2 loop", 2, {"zero_stage": 3}, 1.00),
    "deepspeed1": Pair("zero_stage=1, DeepSpeed stage 1", 2, {"zero_stage": 1}, 1.00),
    "deepspeed2": Pair("zero_stage=2, DeepSpeed stage 2", 2, {"zero_stage": 2}, 1.00),
    "deepspeed3": Pair("zero_stage=3, DeepSpeed stage 3", 2, {"zero_stage": 3}, 1.00),
    "single": Pair("one process, Lightning's SingleDeviceStrategy", 1, {}, 1.02),
}


def other(name: str, rank: int, world: int, size: Size) -> Loop:
    """Returns the loop that ours is compared with."""
    if name.startswith("deepspeed"):
        return deepspeed_loop(int(name.removeprefix("deepspeed")), rank, size)
    if name == "ddp_by_hand":
        return hand_loop(ddp, rank, size)
    if name == "fsdp2_by_hand":
        return hand_loop(fsdp2(world), rank, size)
    strategy: Any = {
        "ddp": DDPStrategy,
        "fsdp": lambda: CpuFSDP(auto_wrap_policy={_block_type(size)}),
        "model_parallel": lambda: ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
        "single": lambda: SingleDeviceStrategy(device=torch.device("cpu")),
    }[name]()
    return trainer_loop(strategy, rank, world, size, clip=PAIRS[name].clip)


def _block_type(size: Size) -> type[nn.Module]:
    return type(size.model().blocks[0])


def measure(rank: int, world: int, name: str, steps: int, size: Size) -> list[tuple[float, float, float, float]]:
    """Runs one comparison on this rank and returns the times of its steps."""
    turns = Turns(steps + WARM_UP, WARM_UP)
    pair = PAIRS[name]
    ours = trainer_loop(Mesh3DStrategy(**pair.ours), rank, world, size, clip=pair.clip)
    turns.run((ours, other(name, rank, world, size)))
    if dist.is_initialized():
        dist.barrier()
    return turns.times()


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=121, help="timed steps of each loop")
    parser.add_argument("--only", choices=PAIRS, help="one comparison")
    options = parser.parse_args()
    print(HEADER, flush=True)
    left_out = []
    for name, pair in PAIRS.items():
        if options.only not in (None, name):
            continue
        if name.startswith("deepspeed") and not has_deepspeed():
            left_out.append(pair.title)
            continue
        rows = run_spmd(measure, pair.world, name, options.steps, SIZE, timeout=600)[0]
        print(Comparison(pair.title, pair.target, rows).line(), flush=True)
    if left_out:
        print(f"\nNot installed, so not compared: {'; '.join(left_out)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
