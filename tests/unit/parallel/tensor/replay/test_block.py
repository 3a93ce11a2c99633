"""When a block is recorded, replayed, checked, forgotten, and split in parts."""

from __future__ import annotations

import copy
import logging
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.graph.calls import around_forward
from lightning_3d.parallel.tensor.replay.block import Replay, ReplayOptions
from lightning_3d.parallel.tensor.replay.blocks import Replays
from lightning_3d.parallel.tensor.replay.changes import Changes, watch
from lightning_3d.shards.threads import ThreadShardGroup, run_threads
from tests.unit.parallel.tensor.replay.toys import (
    WIDTH,
    Block,
    CountingGroup,
    MirrorGroup,
    Twins,
    block_with,
    inputs,
    install,
    read,
    replayed,
)


def core(block: Any, x: Tensor) -> Tensor:
    return block.core(block.norm(x)) + x


def counted(forward: Any = core) -> tuple[Block, list[int]]:
    """Returns a block that counts how often its own code runs, where a replay does not look."""
    runs: list[int] = []

    def counting(block: Any, x: Tensor) -> Tensor:
        runs.append(1)
        return forward(block, x)

    return block_with(counting), runs


def test_own_code_runs_at_the_first_and_second_call_and_at_checks() -> None:
    block, runs = counted()
    replayed(block, block.group, check_every=4)
    counts = []
    for x in inputs(1) * 12:
        block(x)
        counts.append(len(runs))
    assert counts == [1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4]


def test_a_check_exchanges_nothing_of_its_own() -> None:
    block, group = block_with(core), CountingGroup()
    block.group = group
    replayed(block, group, check_every=1)
    for index, x in enumerate(inputs(5)):
        block(x)
        assert group.sums == index + 1


def test_checks_leave_random_numbers_and_checkpoints_alone() -> None:
    def forward(block: Any, x: Tensor) -> Tensor:
        return block.core(F.dropout(x, 0.5)) + x

    module = block_with(forward)
    plain = copy.deepcopy(module)
    replayed(module, module.group, check_every=1)
    for reentrant in (False, True):
        for x in inputs(4):
            results = []
            for each in (module, plain):
                each.zero_grad()
                torch.manual_seed(1)
                y = checkpoint(each.norm, checkpoint(each, x, use_reentrant=False), use_reentrant=reentrant)
                y.sum().backward()
                results.append([y, torch.rand(1), each.up_weight.grad])
            assert all(map(torch.equal, *results))


def test_written_buffers_are_checked_and_left_alone() -> None:
    class Running(Block):
        def __init__(self) -> None:
            super().__init__()
            self.statistics = nn.BatchNorm1d(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.statistics(self.core(x).flatten(0, 1))

    twins = Twins(Running(), check_every=1)
    for x in inputs(5):
        twins.call(x)
        one, other = (module.statistics for module in (twins.module, twins.plain))
        assert torch.equal(one.running_mean, other.running_mean)
        assert one.num_batches_tracked == other.num_batches_tracked
    assert twins.replay.report().replayed


def test_a_found_difference_ends_replays_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def forward(block: Any, x: Tensor) -> Tensor:
        block.history.append(1)
        return block.core(x) * len(block.history)

    block = block_with(forward)
    replay = replayed(block, block.group)
    with caplog.at_level(logging.WARNING):
        for x in inputs(5):
            block(x)
        replay.flush()
        for x in inputs(5):
            block(x)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'block' is not replayed: its recording was not what it did at a later call" in caplog.text


def test_training_comes_back_after_evaluation_without_a_recording() -> None:
    block, runs = counted()
    replayed(block, block.group)
    for x in inputs(3):
        block(x)
    for x in inputs(3):
        block.eval()(x)
    runs.clear()
    block.train()(inputs(1)[0])
    block.eval()(inputs(1)[0])
    assert runs == []


@pytest.mark.parametrize(
    ("change", "recorded_again"),
    [
        (lambda block: setattr(block, "rate", 0.25), True),
        (lambda block: setattr(block, "rate", 0.0), False),
        (lambda block: setattr(block.norm, "eps", 1e-3), True),
        (lambda block: setattr(block.norm, "weight", nn.Parameter(torch.ones(WIDTH))), True),
        (lambda block: delattr(block, "rate"), True),
        (lambda block: block.double().float(), True),
        (lambda block: block.train(), False),
        (lambda block: block._parameters.update(up_weight=nn.Parameter(torch.ones(WIDTH, WIDTH))), False),
    ],
    ids=["value", "same value", "value of a part", "parameter", "deleted", "cast", "same flag", "table of parameters"],
)
def test_changes_of_attributes(change: Any, recorded_again: bool) -> None:
    block, runs = counted()
    plain, _ = counted()
    replayed(block, block.group)
    x = inputs(1)[0]
    for _ in range(3):
        block(x)
    runs.clear()
    for each in (block, plain):
        torch.manual_seed(0)
        change(each)
    assert torch.equal(block(x), plain(x))
    assert bool(runs) is recorded_again


@pytest.mark.parametrize("at_first", [False, True])
def test_parameters_that_want_gradients_from_now_on_or_no_longer_are_seen(at_first: bool) -> None:
    twins = Twins(block_with(core))
    for wanted in (at_first, not at_first, at_first):
        twins.change(lambda block, wanted=wanted: block.norm.requires_grad_(wanted))
        for x in inputs(3):
            twins.call(x)
        assert (twins.module.norm.weight.grad is not None) is wanted
        twins.change(lambda block: block.zero_grad())
    # The kind that was known before is replayed.
    assert twins.replay._recordings == 2
    assert twins.replay.report().replayed


def test_lengths_beyond_the_capacity_are_recorded_only_if_others_pay_for_it() -> None:
    block, runs = counted()
    replay = replayed(block, block.group, capacity=2)
    for steps in (1, 2, 3, 4, 3):
        block(inputs(1, steps)[0])
    assert "change too often" in str(replay._reason)
    for _ in range(300):
        block(inputs(1, 1)[0])
    runs.clear()
    for _ in range(3):
        block(inputs(1, 3)[0])
    assert len(runs) == 2
    assert len(replay._entries) == 2


def test_hooks_of_parts_stop_replays_while_they_are_there() -> None:
    block, runs = counted()
    replay = replayed(block, block.group)
    for x in inputs(3):
        block(x)
    handle = block.norm.register_forward_hook(lambda module, args, output: output * 2)
    runs.clear()
    block(inputs(1)[0])
    assert len(runs) == 1
    assert not replay.report().replayed
    handle.remove()
    block(inputs(1)[0])
    assert len(runs) == 1
    assert replay.report().replayed


def test_hooks_that_were_there_before_run_too() -> None:
    block = block_with(core)
    replay = replayed(block, block.group)
    seen: list[int] = []
    block.norm.register_forward_hook(lambda module, args, output: seen.append(1))
    for x in inputs(3):
        block(x)
    assert len(seen) == 3
    assert str(replay.report()) == "block: not replayed: a module inside has a hook"


def test_a_hook_of_the_block_itself_runs() -> None:
    block = block_with(core)
    replayed(block, block.group)
    seen: list[int] = []
    block.register_forward_hook(lambda module, args, output: seen.append(1))
    for x in inputs(4):
        block(x)
    assert len(seen) == 4


def test_a_profiler_is_left_alone() -> None:
    block = block_with(core)
    replay = replayed(block, block.group)

    def profile(*_: Any) -> None:
        return None

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        block(inputs(1)[0])
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(before)
    assert "profiler" in str(replay.report())
    for x in inputs(3):
        block(x)
        assert sys.getprofile() is before
    assert replay.report().replayed


def test_an_exception_in_a_block_leaves_nothing_behind() -> None:
    def failing(block: Any, x: Tensor) -> Tensor:
        if x.shape[1] == 3:
            raise ValueError("three")
        return block.core(x)

    block = block_with(failing)
    replay = replayed(block, block.group)
    for _ in range(2):
        with pytest.raises(ValueError, match="three"):
            block(inputs(1, 3)[0])
        assert sys.getprofile() is None
    for x in inputs(3):
        block(x)
    assert replay.report().replayed


def test_a_copy_of_a_block_is_replayed_with_its_own_weights() -> None:
    block = block_with(core)
    replayed(block, block.group)
    for x in inputs(3):
        block(x)
    other = copy.deepcopy(block)
    with torch.no_grad():
        other.up_weight.zero_()
    x = inputs(1)[0]
    assert torch.equal(other(x), x)
    assert not torch.equal(block(x), x)


class Experts(nn.Module):
    """Chooses rows by values, so that it cannot be replayed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen = (rows.sum(-1) > 0).nonzero().flatten()
        return rows.index_add(0, chosen, self.inner[0](rows[chosen])).view_as(x)


class Attention(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.core(self.norm(x))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention()])
        self.experts = Experts()
        self.group = self.layers[0].group

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.layers[0](x)
        return x + self.experts(x)


@pytest.mark.parametrize("keep", [False, True])
def test_parts_are_replayed_where_the_block_cannot_be(keep: bool) -> None:
    module = Mixture()
    plain = copy.deepcopy(module)
    replays = Replays({"0": module}, module.group, read=read, kept=[module.experts] if keep else ())
    install(replays, {"0": module})
    for x in inputs(5):
        results = []
        for each in (module, plain):
            each.zero_grad()
            y = each(x)
            y.sum().backward()
            results.append([y, *(parameter.grad for parameter in each.parameters())])
        assert all(map(torch.equal, *results))
    (report,) = replays.reports()
    assert str(report).startswith("0: not replayed: nonzero: the size of its result depends on values; replayed inside")
    assert [part.name for part in report.flat() if part.replayed] == ["0.layers.0"]
    assert ("0.experts" in [part.name for part in report.flat()]) is not keep


def test_ranks_that_are_threads_record_and_replay_each_for_itself() -> None:
    x = inputs(4)
    barred = block_with(core)

    def work(group: ThreadShardGroup, *, replayed_too: bool) -> list[Tensor]:
        block = block_with(core)
        block.group = group
        for name in ("up_weight", "down_weight"):
            part = getattr(barred, name).detach() * (group.rank + 1)
            setattr(block, name, nn.Parameter(part))
        replay = replayed(block, group) if replayed_too else None
        found = []
        for each in x:
            y = block(each.detach().clone().requires_grad_())
            y.sum().backward()
            found += [y.detach(), block.up_weight.grad.clone()]
        assert replay is None or replay.report().replayed
        return found

    plain = run_threads(2, lambda group: work(group, replayed_too=False))
    for ones, others in zip(run_threads(2, lambda group: work(group, replayed_too=True)), plain, strict=True):
        assert all(map(torch.equal, ones, others))


def test_equal_blocks_share_their_operations() -> None:
    blocks = {str(index): Block() for index in range(3)}
    group = MirrorGroup()
    for block in blocks.values():
        block.group = group
        type(block).forward = core
    replays = Replays(blocks, group, read=read)
    install(replays, blocks)
    for x in inputs(3):
        for block in blocks.values():
            x = block(x)
    bodies = {id(entry.program.body) for replay in replays._replays.values() for entry in replay._entries}
    assert len(bodies) == 1


def test_a_module_may_be_watched_for_two_blocks() -> None:
    module = nn.Linear(2, 2)
    one, other = Changes(), Changes()
    watch((module,), one)
    watch((nn.Sequential(module), module), other)
    module.in_features = 3
    module.eval()
    assert (one.count, other.count) == (1, 1)
    assert (one.training, other.training) == (1, 2)


def test_a_block_that_was_not_called_says_so() -> None:
    block = block_with(core)
    replay = Replay(block, block.group, read=read, name="layers.3", options=ReplayOptions())
    around_forward(block, replay.handle)
    assert str(replay.report()) == "layers.3: not replayed: not called yet"
