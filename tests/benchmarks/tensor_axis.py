"""Step times of the tensor axis beside what people use today: `python -m tests.benchmarks.tensor_axis`.

Two gloo processes; in each, blocks of ours, hand-written Megatron blocks and blocks under torch's parallel styles take
turns step by step: forward and backward of the same four blocks. Prints a Markdown table; asserts nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.benchmarks.paired import HEADER, Comparison
from tests.benchmarks.replay_cost import COLUMNS, ROWS, SIZES, Block, Size, applied, by_hand
from tests.spmd.pool import run_spmd

WARM_UP = 5
TARGETS = {("tiny", "by hand"): 1.10, ("medium", "by hand"): 1.00, ("tiny", "styles"): 1.00, ("medium", "styles"): 1.00}
TITLES = {"by hand": "hand-written Megatron blocks", "styles": "torch's ColwiseParallel and RowwiseParallel"}


def with_styles(size: Size, mesh: DeviceMesh) -> nn.Module:
    """Returns blocks under torch's parallel styles."""
    return nn.Sequential(*(cut_by_styles(Block(size.width, size.head), mesh) for _ in range(size.blocks)))


def cut_by_styles(block: Block, mesh: DeviceMesh) -> Block:
    """Cuts a block by torch's parallel styles, with local sizes where theirs must be."""
    plan: dict[str, Any] = dict.fromkeys(COLUMNS, ColwiseParallel()) | dict.fromkeys(ROWS, RowwiseParallel())
    parallelize_module(block, mesh, plan)
    block.attend = _local_attention(block)  # type: ignore[method-assign]
    return block


def _local_attention(block: Block) -> Callable[[Tensor], Tensor]:
    def attend(x: Tensor) -> Tensor:
        batch, steps, _ = x.shape
        q, k, v = (
            projection(x).view(batch, steps, -1, block.head).transpose(1, 2)
            for projection in (block.q, block.k, block.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed: Tensor = block.o(y.transpose(1, 2).reshape(batch, steps, -1))
        return mixed

    return attend


def measure(rank: int, world: int, size: Size, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Returns wall and CPU seconds of each step of each variant."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tensor_parallel",))
    ours, state, _ = applied(size, mesh, replayed=True)
    variants = {"ours": ours, "by hand": by_hand(size, mesh), "styles": with_styles(size, mesh)}
    x = torch.randn(size.batch, size.steps, size.width, requires_grad=True)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in variants}
    with state.activity:
        for index in range(steps + WARM_UP):
            for name in list(variants) if index % 2 else reversed(variants):
                taken = _step(variants[name], x)
                if index >= WARM_UP:
                    times[name].append(taken)
    return times


def _step(module: nn.Module, x: Tensor) -> tuple[float, float]:
    x.grad = None
    for parameter in module.parameters():
        parameter.grad = None
    dist.barrier()
    start = (time.perf_counter(), time.process_time())
    result = module(x)
    whole = result.to_local() if isinstance(result, DTensor) else result
    whole.pow(2).mean().backward()
    return time.perf_counter() - start[0], time.process_time() - start[1]


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="timed steps of each variant; by default 201 tiny, 41 medium ones")
    options = parser.parse_args()
    print(HEADER, flush=True)
    for size in SIZES:
        steps = options.steps or (201 if size.name == "tiny" else 41)
        times = run_spmd(measure, 2, size, steps, timeout=600)[0]
        for other, title in TITLES.items():
            rows = [(a[0], b[0], a[1], b[1]) for a, b in zip(times["ours"], times[other], strict=True)]
            comparison = Comparison(f"tensor 2, {size.name}, {title}", TARGETS[size.name, other], rows)
            print(comparison.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
