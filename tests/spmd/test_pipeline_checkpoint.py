"""Checkpoints of modules whose parameters live on the stages of a pipeline, on gloo processes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_3d.checkpoint.absent import AbsentTensor, unknown
from lightning_3d.checkpoint.gathering import full_state_dict, gather_whole, with_other_state
from lightning_3d.checkpoint.restore import (
    load_module,
    open_checkpoint,
    read_module_state,
)
from lightning_3d.checkpoint.store import CheckpointState, save
from lightning_3d.checkpoint.weights import load_module_state
from lightning_3d.errors import CheckpointError
from lightning_3d.initial.broadcast import BufferBroadcast
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.strategy.setup.optimizers import AbsentParameters
from tests.marks import more
from tests.spmd.packed import TIED, mesh_of
from tests.spmd.pool import run_spmd
from tests.spmd.saved import ALONE, Run, build, stepped_by, trained

pytestmark = pytest.mark.spmd
FORMATS = pytest.mark.parametrize("distributed", [True, False], ids=["directory", "file"])
STEPS = 2


def pipeline(data: int = 1, tensor: int = 1, order: str = "data,pipeline,tensor") -> MeshSpec:
    return MeshSpec(data=data, pipeline=2, tensor=tensor, rank_order=tuple(order.split(",")))


# The first rank of the last one's world has the last stage's neighbour on another position than the others.
PIPE, DATA, TENSOR, TURNED = pipeline(), pipeline(data=2), pipeline(tensor=2), pipeline(2, order="pipeline,data,tensor")
ROUTES: Mapping[int, tuple[tuple[MeshSpec, tuple[MeshSpec, ...]], ...]] = {
    2: ((PIPE, (PIPE, mesh_of(2, 1), mesh_of(1, 2))), (mesh_of(1, 2), (PIPE,))),
    4: (
        (DATA, (DATA, TENSOR, mesh_of(2, 2))),
        (TENSOR, (TENSOR, TURNED, mesh_of(4, 1))),
        (mesh_of(2, 2), (DATA, TENSOR)),
    ),
}


def whole(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns all weights and all of the optimizer's state, as they are now."""
    weights = full_state_dict(run.module, keep=True, layouts=run.layouts, presence=run.presence)
    return copy.deepcopy((weights, gather_whole(run.moments(), True, {}, run.presence)))


def exchanges(rank: int, world: int, directory: Path, distributed: bool) -> None:
    for number, (source, targets) in enumerate(ROUTES[world]):
        run = build(source, rank, seed=1)
        run.train(range(STEPS))
        run.check(STEPS)
        path = directory / f"{number}.ckpt"
        run.save(path, distributed=distributed)
        for target in targets:
            same_elsewhere(whole(run), goes_on(rank, path, target))


def goes_on(rank: int, path: Path, spec: MeshSpec) -> tuple[dict[str, Any], dict[str, Any]]:
    run = build(spec, rank, seed=2)
    run.load(path)
    found = whole(run)
    run.check(STEPS)
    run.train(range(STEPS, STEPS + 1))
    run.check(STEPS + 1)
    return found


def same_elsewhere(before: Any, after: Any) -> None:
    """To the bit, in the same order."""
    (weights, optimizer), (expected, saved) = after, before
    torch.testing.assert_close((weights, optimizer["state"]), (expected, saved["state"]), rtol=0, atol=0)
    assert [*weights] == [*expected]
    assert [*optimizer["state"]] == [*saved["state"]]
    assert optimizer["param_groups"] == saved["param_groups"]


@FORMATS
@pytest.mark.parametrize("world", [2, more(4)])
def test_saved_on_one_mesh_and_loaded_on_another(tmp_path: Path, world: int, distributed: bool) -> None:
    run_spmd(exchanges, world, tmp_path, distributed)
    assert {path.name for path in tmp_path.iterdir()} == {f"{number}.ckpt" for number in range(len(ROUTES[world]))}
    for path in tmp_path.iterdir():
        goes_on(0, path, ALONE)


def starts(rank: int, world: int, path: Path) -> None:
    for spec in (DATA, TENSOR):
        goes_on(rank, path, spec)


@FORMATS
def test_saved_by_one_process_and_loaded_on_meshes(tmp_path: Path, distributed: bool) -> None:
    run = build(ALONE, 0, seed=1)
    run.train(range(STEPS))
    run.save(tmp_path / "a.ckpt", distributed=distributed)
    run_spmd(starts, 4, tmp_path / "a.ckpt")


def test_a_file_that_knows_no_names(tmp_path: Path) -> None:
    run = build(ALONE, 0, seed=1)
    run.train(range(STEPS))
    plain = {"state_dict": run.module.state_dict(), "optimizer_states": [run.optimizer.state_dict()]}
    torch.save(plain, tmp_path / "a.ckpt")
    run_spmd(starts, 4, tmp_path / "a.ckpt")


def saves(rank: int, world: int, path: Path, spec: MeshSpec, distributed: bool) -> None:
    run = build(spec, rank, seed=1)
    run.train(range(STEPS))
    run.save(path, distributed=distributed, epoch=3)


def test_a_file_is_what_one_device_would_write(tmp_path: Path) -> None:
    run_spmd(saves, 2, tmp_path / "two.ckpt", PIPE, False)
    saves(0, 1, tmp_path / "one.ckpt", ALONE, False)
    one, two = torch.load(tmp_path / "one.ckpt"), torch.load(tmp_path / "two.ckpt")
    of_one, of_two = one["optimizer_states"][0], two["optimizer_states"][0]
    for one_part, two_part in ((one["state_dict"], two["state_dict"]), (of_one["state"], of_two["state"])):
        torch.testing.assert_close(two_part, one_part, rtol=0, atol=0)
        assert [*two_part] == [*one_part]
    assert of_two["param_groups"] == of_one["param_groups"]
    assert two.keys() == one.keys()
    assert two["state_dict"][TIED] is two["state_dict"]["blocks.1.unequal.weight"]
    alone = build(ALONE, 0, seed=2)
    alone.optimizer.load_state_dict(two["optimizer_states"][0])
    for parameter in alone.module.parameters():
        assert all(value.shape in ((), parameter.shape) for value in alone.optimizer.state.get(parameter, {}).values())


@pytest.mark.parametrize("spec", [DATA, TENSOR], ids=str)
def test_every_element_is_written_once(tmp_path: Path, spec: MeshSpec) -> None:
    run_spmd(saves, 4, tmp_path / "a.ckpt", spec, True)
    saves(0, 1, tmp_path / "alone.ckpt", ALONE, True)
    index, alone = (FileSystemReader(tmp_path / name).read_metadata() for name in ("a.ckpt", "alone.ckpt"))
    assert index.state_dict_metadata.keys() == alone.state_dict_metadata.keys()
    for name, entry in index.state_dict_metadata.items():
        assert entry.size == alone.state_dict_metadata[name].size
        assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel(), name
    alias, first = (
        [entry for at, entry in index.storage_data.items() if at.fqn == f"state_dict.{name}"]
        for name in ("blocks.1.unequal.weight", TIED)
    )
    assert alias == first


def becomes_whole(rank: int, world: int, spec: MeshSpec) -> None:
    run = build(spec, rank, seed=1)
    run.train(range(STEPS))
    weights, moments = trained(STEPS)
    found = full_state_dict(run.module, keep=rank == 3, layouts=run.layouts, presence=run.presence)
    assert [*found] == ([*weights] if rank == 3 else [])
    torch.testing.assert_close(found, weights if rank == 3 else {}, rtol=1e-12, atol=1e-12)
    everywhere = gather_whole(run.moments()["state"], True, {}, run.presence)
    torch.testing.assert_close(everywhere, moments, rtol=1e-12, atol=1e-12)
    # A parameter by itself, as it lies here or not at all.
    own = dict(run.module.named_parameters())["norm.weight"]
    one = gather_whole({"norm.weight": unknown() if own.is_meta else own}, True, {}, run.presence)
    assert torch.equal(one["norm.weight"], full_norm(run))


def full_norm(run: Run) -> Tensor:
    return full_state_dict(run.module, keep=True, layouts=run.layouts, presence=run.presence)["norm.weight"]


@pytest.mark.parametrize("spec", [DATA, TENSOR, TURNED], ids=str)
def test_whole_states(spec: MeshSpec) -> None:
    run_spmd(becomes_whole, 4, spec)


def on_local_disks(rank: int, world: int, directory: Path, distributed: bool) -> None:
    # With this order a disk holds one stage only.
    node = directory / f"node{rank // 2}"
    run = build(TURNED, rank, seed=1)
    run.train(range(STEPS))
    run.save(node / "a.ckpt", distributed=distributed)
    goes_on(rank, node / "a.ckpt", TENSOR)


@FORMATS
def test_disks_of_their_own_hold_whole_checkpoints(tmp_path: Path, distributed: bool) -> None:
    run_spmd(on_local_disks, 4, tmp_path, distributed)
    for node in ("node0", "node1"):
        goes_on(0, tmp_path / node / "a.ckpt", ALONE)


def has_hooks(rank: int, world: int, path: Path, distributed: bool) -> None:
    run = build(PIPE, rank, seed=1)
    expected = full_state_dict(run.module, keep=True, layouts=run.layouts, presence=run.presence)
    # A callback that keeps an average, and hooks that halve, copy and rename.
    average = {name: parameter.detach().clone() for name, parameter in run.module.named_parameters()}
    state = {f"net.{name}": (value * 2).half().cpu() for name, value in copy.deepcopy(run.state()).items()}
    run.save(path, distributed=distributed, average=average, state_dict=state)

    stored = open_checkpoint(path, weights_only=None, group=run.group)
    assert all(torch.equal(value, expected[name]) for name, value in stored.metadata["average"].items())
    fresh = build(PIPE, rank, seed=2)
    state = read_module_state(stored, fresh.module, group=run.group)
    assert state.keys() == {f"net.{name}" for name in expected}
    state = {name.removeprefix("net."): value for name, value in state.items()}
    load_module_state(fresh.module, state, strict=True, presence=run.presence)
    loaded = full_state_dict(fresh.module, keep=True, presence=run.presence)
    for name, value in loaded.items():
        half = (expected[name] * 2).half()
        assert torch.equal(value, half.double() if "seen" not in name else half.float()), name


@FORMATS
def test_hooks_edit_states(tmp_path: Path, distributed: bool) -> None:
    run_spmd(has_hooks, 2, tmp_path / "a.ckpt", distributed)


def moves_between_stages(rank: int, world: int, path: Path) -> str:
    run = build(TENSOR, rank, seed=1)
    expected = full_state_dict(run.module, keep=True, layouts=run.layouts, presence=run.presence)
    run.save(path, distributed=True)
    fresh = build(TENSOR, rank, seed=2)
    stored = open_checkpoint(path, weights_only=None, group=run.group)
    state = read_module_state(stored, fresh.module, group=run.group, layouts=run.layouts)
    absent = {name for name, value in state.items() if isinstance(value, AbsentTensor)}
    assert absent == {name for name in fresh.module.state_dict() if fresh.module.state_dict()[name].is_meta}
    # What lies on the first stage goes where the second one has its own, packed parameters among them.
    swapped = {
        name: state[name.replace("blocks.1.", "blocks.0.") if name.startswith("blocks.1.") else name] for name in state
    }
    load_module_state(fresh.module, swapped, strict=True, layouts=run.layouts, presence=run.presence)
    loaded = full_state_dict(fresh.module, keep=True, layouts=run.layouts, presence=run.presence)
    for name, value in loaded.items():
        assert torch.equal(value, expected[name.replace("blocks.1.", "blocks.0.")]), name
    del state["norm.weight"], state["odd.bias"]
    with pytest.raises(CheckpointError) as caught:
        load_module_state(fresh.module, state, strict=True, layouts=run.layouts, presence=run.presence)
    return str(caught.value)


def test_hooks_move_weights_between_stages_and_what_is_missing_is_named(tmp_path: Path) -> None:
    errors = run_spmd(moves_between_stages, 4, tmp_path / "a.ckpt")
    assert len(set(errors)) == 1
    assert "2 missing (norm.weight, odd.bias)" in errors[0]


def trained_parts(module: nn.Module, but: str = " ") -> list[nn.Parameter]:
    return [parameter for name, parameter in module.named_parameters() if parameter.requires_grad and but not in name]


def refuses(rank: int, world: int, path: Path, distributed: bool) -> list[str]:
    run = build(PIPE, rank, seed=1)
    run.save(path, distributed=distributed)
    found = []
    fresh = build(PIPE, rank, seed=1)
    # Without some parameters of both stages.
    fewer = stepped_by(fresh, lambda module: torch.optim.AdamW(trained_parts(module, but="fused"), lr=0.1))
    with pytest.raises(CheckpointError) as caught:
        fewer.load(path)
    found.append(str(caught.value))
    nowhere = torch.zeros(3, device="meta")
    with pytest.raises(CheckpointError) as caught:
        run.save(path, distributed=distributed, callback={"scores": nowhere})
    return [*found, str(caught.value)]


@FORMATS
def test_errors_are_of_the_whole_module(tmp_path: Path, distributed: bool) -> None:
    first, second = run_spmd(refuses, 2, tmp_path / "a.ckpt", distributed)
    assert first == second
    assert "optimizer 0" in first[0]
    assert "no rank has values of callback.scores" in first[1]


def resumes_other_optimizers(rank: int, world: int, path: Path, kind: str, distributed: bool) -> None:
    runs = []
    for seed in (1, 2):
        run = build(PIPE, rank, seed=seed)
        runs.append(stepped_by(run, lambda module: getattr(torch.optim, kind)(trained_parts(module), lr=0.1)))
    run, fresh = runs
    run.train(range(STEPS))
    run.save(path, distributed=distributed)
    fresh.load(path)
    same_elsewhere(whole(run), whole(fresh))


@FORMATS
@pytest.mark.parametrize("kind", ["SGD", "Adafactor", "Adagrad"])
def test_state_of_other_shapes_or_none_or_from_the_start(tmp_path: Path, kind: str, distributed: bool) -> None:
    run_spmd(resumes_other_optimizers, 2, tmp_path / "a.ckpt", kind, distributed)


def adds_groups(rank: int, world: int, path: Path, distributed: bool) -> None:
    runs = []
    for seed in (1, 2):
        run = build(PIPE, rank, seed=seed)
        run = stepped_by(run, lambda module: torch.optim.AdamW(module.blocks.parameters(), lr=0.1))
        run.optimizer.add_param_group({"params": [*run.module.uneven.parameters(), *run.module.odd.parameters()]})
        AbsentParameters(run.module).take_out([run.optimizer])
        runs.append(run)
    run, fresh = runs
    run.train(range(STEPS))
    groups = run.moments()["param_groups"]
    assert groups[0]["params"] == [name for name, _ in run.module.named_parameters() if name.startswith("blocks")]
    # Nobody knows the order any more; it is the module's.
    assert groups[1]["params"] == ["odd.weight", "odd.bias", "uneven.weight", "uneven.bias"]
    run.save(path, distributed=distributed)
    fresh.load(path)
    same_elsewhere(whole(run), whole(fresh))


@FORMATS
def test_groups_that_were_added_later(tmp_path: Path, distributed: bool) -> None:
    run_spmd(adds_groups, 2, tmp_path / "a.ckpt", distributed)


class Tally(nn.Module):
    """Extra state beside a buffer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.register_buffer("total", torch.tensor(float(count)))
        self.count = count

    def get_extra_state(self) -> int:
        return self.count

    def set_extra_state(self, state: int) -> None:
        self.count = state


def has_other_state(rank: int, world: int, path: Path, distributed: bool) -> None:
    run = build(PIPE, rank, seed=1)
    presence = run.presence
    assert presence is not None
    presence = replace(presence, modules={"0": 0, "1": 1}, others=1)
    module = nn.Sequential(Tally(10 + rank), Tally(20 + rank), Tally(30 + rank))
    BufferBroadcast(module, presence.group, presence.source)()
    assert [part.total.item() for part in module] == [10, 21, 31]
    state = with_other_state(module.state_dict(), module, presence)
    assert [state[f"{at}._extra_state"] for at in range(3)] == [10, 21, 31]
    content = CheckpointState.of({"state_dict": state}, presence=presence)
    save(path, content, distributed=distributed, group=run.group)
    fresh = nn.Sequential(Tally(0), Tally(0), Tally(0))
    stored = open_checkpoint(path, weights_only=None, group=run.group)
    load_module(stored, fresh, strict=True, group=run.group, presence=presence)
    assert [(part.total.item(), part.count) for part in fresh] == [(10, 10), (21, 21), (31, 31)]


@FORMATS
def test_buffers_and_extra_state_are_of_the_ranks_that_call_their_modules(tmp_path: Path, distributed: bool) -> None:
    run_spmd(has_other_state, 2, tmp_path / "a.ckpt", distributed)
