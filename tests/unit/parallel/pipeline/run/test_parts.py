from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_3d.errors import ModuleError
from lightning_3d.parallel.pipeline.record.step import Origin, Value
from lightning_3d.parallel.pipeline.run.parts import WatchedShard, local_part, unwatched, watched, with_part
from lightning_3d.shards.executor import Shard
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.threads import ThreadShardGroup, run_threads

ORIGIN = Origin(kind="module", maker="block")
WHOLE = Value(origin=ORIGIN, shape=(4, 3), dtype=torch.float32)
CUT = Value(origin=ORIGIN, shape=(4, 3), dtype=torch.float32, layout=Layout(0, (4,)), tensor_ranks=2)


class Seen(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def work(shard: Tensor) -> Tensor:
    out = (shard + 1).float().mul(2)
    out -= shard
    return torch.cat([out[:, :1], out], 1).T.T


def test_a_mode_sees_what_is_done_with_watched_shards() -> None:
    def run(group: ThreadShardGroup) -> tuple[Tensor, Tensor, list[str], bool]:
        local = torch.arange(6.0).view(2, 3) + group.rank
        plain = Shard(local, 0, (4,), group)
        expected = work(plain)
        kept = [plain]
        assert watched(kept)[0] is plain
        assert type(plain) is WatchedShard
        with Seen() as seen:
            found = work(plain)
        unwatched(kept)
        return found._local, expected._local, seen.names, type(plain) is Shard  # type: ignore[attr-defined]

    for found, expected, names, again in run_threads(2, run):
        assert torch.equal(found, expected)
        assert again
        assert [name for name in names if name != "__get__"] == [
            "add", "float", "mul", "sub_", "__getitem__", "cat"
        ]  # fmt: skip


def test_what_crosses_is_the_local_part() -> None:
    def run(group: ThreadShardGroup) -> bool:
        local = torch.ones(2, 3)
        shard = Shard(local, 0, (4,), group)
        sent = local_part(shard, CUT)
        received = with_part(sent, CUT, group)
        assert isinstance(received, WatchedShard)
        return received.cut == shard.cut and received.shape == (4, 3) and torch.equal(sent, local)

    assert all(run_threads(2, run))
    assert with_part(torch.ones(4, 3), WHOLE, None).shape == (4, 3)


def test_another_value_than_the_recorded_one_is_refused() -> None:
    with pytest.raises(ModuleError, match=r"is \[4, 3\] float32, and was \[4, 3\] float32 cut along dim 0"):
        local_part(torch.ones(4, 3), CUT)
    with pytest.raises(ModuleError, match=r"is \[4, 3\] float64, and was \[4, 3\] float32 when"):
        local_part(torch.ones(4, 3, dtype=torch.float64), WHOLE)


def test_parts_are_dense() -> None:
    assert local_part(torch.ones(3, 4).T, WHOLE).is_contiguous()
