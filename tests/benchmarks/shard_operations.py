"""What an operation on a shard costs over the plain one: `python -m tests.benchmarks.shard_operations`.

One of two ranks, on tensors so small that only the calls cost; sums over the ranks are left out. Prints a Markdown
table; asserts nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards.executor import Shard
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import join

Operation = Callable[[], object]
CALLS, ROUNDS = 200, 80


class OneOfTwo(ShardGroup):
    """A rank whose partner holds the same."""

    def __init__(self) -> None:
        super().__init__(2, 0)

    def sum(self, value: Tensor) -> Tensor:
        """Returns the value."""
        return value

    def max(self, value: Tensor) -> Tensor:
        """Returns the value."""
        return value

    def gather(self, part: Tensor, dim: int, segments: Sequence[int]) -> Tensor:
        """Joins two copies."""
        return join((part, part), dim, segments)

    def sum_part(self, value: Tensor, dim: int) -> Tensor:
        """Returns the first half."""
        return value.narrow(dim, 0, value.shape[dim] // 2)


def operations() -> dict[str, tuple[Operation, Operation]]:
    """Returns pairs: on a rank's part as plain tensor, and on the shard."""
    group = OneOfTwo()
    features, heads, packed = torch.randn(2, 4, 16), torch.randn(2, 2, 8, 8), torch.randn(2, 4, 24)
    inputs, rotary, mask = torch.randn(2, 4, 8), torch.randn(1, 1, 8, 8), torch.ones(8, 8, dtype=torch.bool).tril()
    column, bias, row = torch.randn(24, 8), torch.randn(24), torch.randn(8, 16)
    x, q = Shard(features, 2, (32,), group), Shard(heads, 1, (4,), group)
    p = Shard(packed, 2, (16, 16, 16), group)
    up, up_bias = Shard(column, 0, (16, 16, 16), group), Shard(bias, 0, (16, 16, 16), group)
    down = Shard(row, 1, (32,), group)
    return {
        "mul by a number": (lambda: features * 2.0, lambda: x * 2.0),
        "add": (lambda: features + features, lambda: x + x),
        "mul by a plain tensor": (lambda: heads * rotary, lambda: q * rotary),
        "masked_fill": (lambda: heads.masked_fill(mask, 0.0), lambda: q.masked_fill(mask, 0.0)),
        "view": (lambda: features.view(2, 4, 2, 8), lambda: x.view(2, 4, 4, 8)),
        "transpose": (lambda: features.transpose(1, 2), lambda: x.transpose(1, 2)),
        "contiguous": (lambda: heads.transpose(1, 2).contiguous(), lambda: q.transpose(1, 2).contiguous()),
        "split in three": (lambda: packed.split(8, 2), lambda: p.split(16, 2)),
        "slice": (lambda: heads[..., :4], lambda: q[..., :4]),
        "cat": (lambda: torch.cat((heads, heads), -1), lambda: torch.cat((q, q), -1)),
        "size()": (lambda: features.size(), lambda: x.size()),
        "shape[-1]": (lambda: features.shape[-1], lambda: x.shape[-1]),
        "silu": (lambda: F.silu(features), lambda: F.silu(x)),
        "gelu": (lambda: F.gelu(features), lambda: F.gelu(x)),
        "softmax": (lambda: F.softmax(heads, -1), lambda: F.softmax(q, -1)),
        "matmul": (lambda: heads @ heads, lambda: q @ q),
        "attention": (
            lambda: F.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
            lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True),
        ),
        "column linear": (lambda: F.linear(inputs, column, bias), lambda: F.linear(inputs, up, up_bias)),
        "row linear": (lambda: F.linear(features, row), lambda: F.linear(x, down)),
    }


def microseconds(plain: Operation, sharded: Operation) -> tuple[float, float]:
    """Returns the best of some rounds of both, which take turns."""
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for index, operation in enumerate((plain, sharded)):
            start = time.perf_counter()
            for _ in range(CALLS):
                operation()
            best[index] = min(best[index], (time.perf_counter() - start) / CALLS * 1e6)
    return best[0], best[1]


def main() -> None:
    """Measures all and prints the table."""
    torch.set_num_threads(1)
    print("| operation | plain, µs | shard, µs | overhead, µs |\n|---|---|---|---|")
    overheads = []
    for name, (plain, sharded) in operations().items():
        before, after = microseconds(plain, sharded)
        overheads.append(after - before)
        print(f"| {name} | {before:.1f} | {after:.1f} | {after - before:+.1f} |")
    print(f"| mean | | | {statistics.mean(overheads):+.1f} |")


if __name__ == "__main__":
    main()
