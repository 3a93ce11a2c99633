"""Checkpoints of modules that the tensor axis cuts, packed and padded parameters among them, on gloo processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from lightning_3d.checkpoint.gathering import full_state_dict, gather_whole
from lightning_3d.checkpoint.packed import PackedTensor
from lightning_3d.checkpoint.restore import load_module, open_checkpoint, read_module_state
from lightning_3d.checkpoint.weights import load_module_state
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh.spec import MeshSpec
from tests.marks import more
from tests.spmd.packed import TIED, mesh_of
from tests.spmd.pool import run_spmd
from tests.spmd.saved import ALONE, Run, build, equal, trained

pytestmark = pytest.mark.spmd

STEPS = 2
SQUARE, TENSOR, DATA, HYBRID = mesh_of(2, 2), mesh_of(1, 4), mesh_of(4, 1), mesh_of(2, 2, 2)
# How a checkpoint is saved, and on which meshes it is loaded.
ROUTES = (
    (SQUARE, (SQUARE, TENSOR, DATA, HYBRID)),
    (TENSOR, (SQUARE, TENSOR)),
    (DATA, (SQUARE, TENSOR)),
    (HYBRID, (HYBRID, SQUARE)),
)


def exchanges(rank: int, world: int, directory: Path, distributed: bool) -> None:
    for source, targets in ROUTES:
        run = build(source, rank, seed=1)
        run.train(range(STEPS))
        path = directory / f"{source.data}x{source.tensor}x{source.data_replicate}.ckpt"
        run.save(path, distributed=distributed)
        for target in targets:
            goes_on(rank, path, target)


def goes_on(rank: int, path: Path, spec: MeshSpec) -> None:
    run = build(spec, rank, seed=2)
    run.load(path)
    run.check(STEPS)
    run.train(range(STEPS, STEPS + 1))
    run.check(STEPS + 1)


FORMATS = pytest.mark.parametrize("distributed", [True, more(False)], ids=["directory", "file"])


@FORMATS
def test_saved_on_one_mesh_and_loaded_on_another(tmp_path: Path, distributed: bool) -> None:
    run_spmd(exchanges, 4, tmp_path, distributed)
    assert len(list(tmp_path.iterdir())) == len(ROUTES)
    for path in tmp_path.iterdir():
        goes_on(0, path, ALONE)


def starts_from_one_process(rank: int, world: int, path: Path) -> None:
    for spec in (SQUARE, TENSOR, HYBRID):
        goes_on(rank, path, spec)


@FORMATS
def test_saved_by_one_process_and_loaded_on_meshes(tmp_path: Path, distributed: bool) -> None:
    run = build(ALONE, 0, seed=1)
    run.train(range(STEPS))
    run.save(tmp_path / "a.ckpt", distributed=distributed)
    run_spmd(starts_from_one_process, 4, tmp_path / "a.ckpt")


def writes_once(rank: int, world: int, path: Path, spec: MeshSpec) -> None:
    run = build(spec, rank, seed=1)
    run.train(range(1))
    run.save(path, distributed=True)


@pytest.mark.parametrize("spec", [SQUARE, HYBRID], ids=str)
def test_every_element_is_written_once(tmp_path: Path, spec: MeshSpec) -> None:
    run_spmd(writes_once, 4, tmp_path / "a.ckpt", spec)
    index = FileSystemReader(tmp_path / "a.ckpt").read_metadata()
    for name, entry in index.state_dict_metadata.items():
        assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel(), name
    weights = {at.offset for at in index.storage_data if at.fqn == "state_dict.blocks.0.fused.weight"}
    # Three segments, two tensor ranks, and a data axis that cuts in the middle of the second segment.
    assert weights == {(at, 0) for at in ((0, 4, 8, 10, 12, 14, 16, 20) if spec is SQUARE else (0, 4, 8, 12, 16, 20))}
    steps = [at for at in index.storage_data if at.fqn == "optimizer_0.state.blocks.0.fused.weight.step"]
    assert len(steps) == 1
    alias = [entry for at, entry in index.storage_data.items() if at.fqn == "state_dict.blocks.1.unequal.weight"]
    assert alias == [entry for at, entry in index.storage_data.items() if at.fqn == f"state_dict.{TIED}"]


def becomes_whole(rank: int, world: int, spec: MeshSpec) -> None:
    run = build(spec, rank, seed=1)
    run.train(range(STEPS))
    weights, moments = trained(STEPS)
    full = full_state_dict(run.module, keep=True, layouts=run.layouts)
    torch.testing.assert_close(full, weights, rtol=1e-12, atol=1e-12)
    assert full_state_dict(run.module, keep=False, layouts=run.layouts) == {}
    whole = gather_whole(run.moments()["state"], rank == 1, {})
    if rank == 1:
        torch.testing.assert_close(whole, moments, rtol=1e-12, atol=1e-12)


def test_whole_states_are_in_original_order() -> None:
    for spec in (SQUARE, TENSOR, DATA, HYBRID):
        run_spmd(becomes_whole, 4, spec)


def on_local_disks(rank: int, world: int, directory: Path, distributed: bool) -> None:
    node = directory / f"node{rank // 2}"
    run = build(SQUARE, rank, seed=1)
    run.train(range(STEPS))
    run.save(node / "a.ckpt", distributed=distributed)
    goes_on(rank, node / "a.ckpt", SQUARE)


@FORMATS
def test_disks_of_their_own_hold_whole_checkpoints(tmp_path: Path, distributed: bool) -> None:
    run_spmd(on_local_disks, 4, tmp_path, distributed)
    for node in ("node0", "node1"):
        goes_on(0, tmp_path / node / "a.ckpt", ALONE)


def has_hooks(rank: int, world: int, path: Path, distributed: bool) -> None:
    run = build(SQUARE, rank, seed=1)
    layouts, group = run.layouts, run.group
    weights = {name: value.detach().clone() for name, value in run.state().items()}
    averaged = {name: value for name, value in weights.items() if isinstance(value, PackedTensor)}
    parameters = dict(run.module.state_dict())
    assert not any(isinstance(value, PackedTensor) for value in parameters.values())
    # A hook that saves half precision, a callback that keeps copies, and a hook that asks the module itself.
    half = {name: value.half() for name, value in weights.items()}
    run.save(path / "half.ckpt", distributed=distributed, state_dict=half, kept=averaged)
    run.save(path / "own.ckpt", distributed=distributed, state_dict=parameters)

    expected = build(ALONE, 0, seed=1).state()
    stored = open_checkpoint(path / "half.ckpt", weights_only=None, group=group)
    assert stored.metadata["kept"].keys() == averaged.keys()
    assert all(torch.equal(value, expected[name]) for name, value in stored.metadata["kept"].items())
    fresh = build(SQUARE, rank, seed=2).module
    read = read_module_state(stored, fresh, group=group, layouts=layouts)
    # A hook of loading puts a whole tensor, and another rank's own parameter, in the place of shards.
    whole = torch.arange(24.0).double()
    read["blocks.0.fused.bias"] = whole
    read["blocks.1.fused.bias"] = dict(run.module.named_parameters())["blocks.1.fused.bias"].detach()
    load_module_state(fresh, read, strict=True, layouts=layouts)
    for name, parameter in fresh.named_parameters():
        value = {"blocks.0.fused.bias": whole, "blocks.1.fused.bias": expected["blocks.1.fused.bias"]}.get(
            name, expected[name].half().double()
        )
        equal(parameter.detach(), value, SQUARE, rank, name)


@FORMATS
def test_hooks_edit_states_in_original_order(tmp_path: Path, distributed: bool) -> None:
    run_spmd(has_hooks, 4, tmp_path, distributed)
    run = build(ALONE, 0, seed=2)
    stored = open_checkpoint(tmp_path / "own.ckpt", weights_only=None, group=None)
    load_module(stored, run.module, strict=True, group=None)
    expected = build(ALONE, 0, seed=1).state()
    assert all(torch.equal(value, expected[name]) for name, value in run.state().items())


def with_adafactor(spec: MeshSpec, rank: int) -> Run:
    run = build(spec, rank, seed=1)
    return replace(run, optimizer=torch.optim.Adafactor(run.module.parameters(), lr=0.1))


def refuses_state(rank: int, world: int, path: Path) -> str:
    run = with_adafactor(SQUARE, rank)
    with pytest.raises(CheckpointError) as caught:
        run.load(path)
    return str(caught.value)


@FORMATS
def test_state_without_an_original_order_is_refused(tmp_path: Path, distributed: bool) -> None:
    run = with_adafactor(ALONE, 0)
    run.train(range(1))
    run.save(tmp_path / "a.ckpt", distributed=distributed)
    errors = run_spmd(refuses_state, 4, tmp_path / "a.ckpt")
    assert len(set(errors)) == 1
    assert "blocks.0.swapped of shape (7, 24) is cut on dim 1 in 8|8|8" in errors[0]
    assert "state of shape (1, 24), whose original order is not known" in errors[0]
