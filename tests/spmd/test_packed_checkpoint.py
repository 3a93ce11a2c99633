"""Checkpoints of modules that the tensor axis cuts, packed and padded parameters among them, on gloo processes."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.gathering import full_state_dict, gather_whole
from lightning_3d.checkpoint.layout import every_name, module_state
from lightning_3d.checkpoint.optimizers import optimizer_state
from lightning_3d.checkpoint.packed import PackedTensor
from lightning_3d.checkpoint.restore import (
    load_module,
    load_module_state,
    load_optimizers,
    open_checkpoint,
    read_module_state,
)
from lightning_3d.checkpoint.store import CheckpointState, save
from lightning_3d.errors import CheckpointError
from lightning_3d.mesh.spec import MeshSpec
from tests.spmd.packed import TIED, Stack, cut_over, cuts_of, expected_part, mesh_of, packed_of
from tests.spmd.pool import run_spmd

pytestmark = pytest.mark.spmd

STEPS = 2
ALONE = mesh_of(1, 1)
SQUARE, TENSOR, DATA, HYBRID = mesh_of(2, 2), mesh_of(1, 4), mesh_of(4, 1), mesh_of(2, 2, 2)
# How a checkpoint is saved, and on which meshes it is loaded.
ROUTES = (
    (SQUARE, (SQUARE, TENSOR, DATA, HYBRID)),
    (TENSOR, (SQUARE, TENSOR)),
    (DATA, (SQUARE, TENSOR)),
    (HYBRID, (HYBRID, SQUARE)),
)


def build(spec: MeshSpec, seed: int) -> tuple[Stack, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = Stack().double()
    module.norm.bias.requires_grad_(False)
    if spec != ALONE:
        cut_over(module, spec)
    # Another order than the module's, and two groups.
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad][::-1]
    groups = [{"params": parameters[:4], "weight_decay": 0.3}, {"params": parameters[4:]}]
    return module, torch.optim.AdamW(groups, lr=0.1)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, spec: MeshSpec, rank: int, steps: range) -> None:
    """Steps on gradients of which every rank holds its part; they depend on the name and the step alone."""
    for step in steps:
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + step)
            shape, layout = [*parameter.shape], cuts_of(spec.tensor).get(name)
            if layout is not None:
                shape[layout.dim] = layout.length
            whole = torch.randn(shape, generator=generator, dtype=parameter.dtype)
            if isinstance(parameter, DTensor):
                parameter.grad = torch.empty_like(parameter)
                parameter.grad.to_local().copy_(expected_part(whole, spec, rank, layout))
            else:
                parameter.grad = whole
        optimizer.step()
        optimizer.zero_grad()


def trained(steps: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the state of a module and an optimizer after some steps on one process."""
    module, optimizer = build(ALONE, seed=1)
    train(module, optimizer, ALONE, 0, range(steps))
    return module_state(module), optimizer_state(module, optimizer)["state"]


def save_all(
    path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, spec: MeshSpec, *, distributed: bool, **more: Any
) -> None:
    layouts = packed_of(spec.tensor)
    checkpoint = {
        "state_dict": module_state(module, layouts),
        "optimizer_states": [optimizer_state(module, optimizer, layouts)],
        **more,
    }
    state = CheckpointState.of(checkpoint, layouts=every_name(module, layouts))
    save(path, state, distributed=distributed, group=dist.group.WORLD if dist.is_initialized() else None)


def load_all(path: Path, module: nn.Module, optimizer: torch.optim.Optimizer, spec: MeshSpec) -> None:
    group, layouts = dist.group.WORLD if dist.is_initialized() else None, packed_of(spec.tensor)
    stored = open_checkpoint(path, weights_only=None, group=group)
    load_module(stored, module, strict=True, group=group, layouts=layouts)
    load_optimizers(stored, module, [optimizer], group=group, layouts=layouts)


def equal(value: Any, whole: Tensor, spec: MeshSpec, rank: int, name: str) -> None:
    local = value.to_local() if isinstance(value, DTensor) else value
    part = expected_part(whole, spec, rank, cuts_of(spec.tensor).get(name)) if isinstance(value, DTensor) else whole
    torch.testing.assert_close(local, part, rtol=1e-12, atol=1e-12, msg=lambda text: f"{name}: {text}")


def check(module: Stack, optimizer: torch.optim.Optimizer, spec: MeshSpec, rank: int, steps: int) -> None:
    """Every rank holds its part of what one process would have, in weights and in AdamW's moments."""
    weights, moments = trained(steps)
    assert module.blocks[1].unequal.weight is module.blocks[0].unequal.weight
    for name, parameter in module.named_parameters():
        equal(parameter.detach(), weights[name], spec, rank, name)
        assert (parameter in optimizer.state) == (name in moments)
        for key, value in optimizer.state.get(parameter, {}).items():
            equal(value, moments[name][key], spec, rank, name)


def exchanges(rank: int, world: int, directory: Path, distributed: bool) -> None:
    for source, targets in ROUTES:
        module, optimizer = build(source, seed=1)
        train(module, optimizer, source, rank, range(STEPS))
        path = directory / f"{source.data}x{source.tensor}x{source.data_replicate}.ckpt"
        save_all(path, module, optimizer, source, distributed=distributed)
        for target in targets:
            goes_on(rank, path, target)


def goes_on(rank: int, path: Path, spec: MeshSpec) -> None:
    module, optimizer = build(spec, seed=2)
    load_all(path, module, optimizer, spec)
    check(module, optimizer, spec, rank, STEPS)
    train(module, optimizer, spec, rank, range(STEPS, STEPS + 1))
    check(module, optimizer, spec, rank, STEPS + 1)


FORMATS = pytest.mark.parametrize("distributed", [True, False], ids=["directory", "file"])


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
    module, optimizer = build(ALONE, seed=1)
    train(module, optimizer, ALONE, 0, range(STEPS))
    save_all(tmp_path / "a.ckpt", module, optimizer, ALONE, distributed=distributed)
    run_spmd(starts_from_one_process, 4, tmp_path / "a.ckpt")


def writes_once(rank: int, world: int, path: Path, spec: MeshSpec) -> None:
    module, optimizer = build(spec, seed=1)
    train(module, optimizer, spec, rank, range(1))
    save_all(path, module, optimizer, spec, distributed=True)


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
    module, optimizer = build(spec, seed=1)
    train(module, optimizer, spec, rank, range(STEPS))
    layouts = packed_of(spec.tensor)
    weights, moments = trained(STEPS)
    torch.testing.assert_close(full_state_dict(module, keep=True, layouts=layouts), weights, rtol=1e-12, atol=1e-12)
    assert full_state_dict(module, keep=False, layouts=layouts) == {}
    whole = gather_whole(optimizer_state(module, optimizer, layouts)["state"], rank == 1, {})
    if rank == 1:
        torch.testing.assert_close(whole, moments, rtol=1e-12, atol=1e-12)


def test_whole_states_are_in_original_order() -> None:
    for spec in (SQUARE, TENSOR, DATA, HYBRID):
        run_spmd(becomes_whole, 4, spec)


def on_local_disks(rank: int, world: int, directory: Path, distributed: bool) -> None:
    node = directory / f"node{rank // 2}"
    module, optimizer = build(SQUARE, seed=1)
    train(module, optimizer, SQUARE, rank, range(STEPS))
    save_all(node / "a.ckpt", module, optimizer, SQUARE, distributed=distributed)
    goes_on(rank, node / "a.ckpt", SQUARE)


@FORMATS
def test_disks_of_their_own_hold_whole_checkpoints(tmp_path: Path, distributed: bool) -> None:
    run_spmd(on_local_disks, 4, tmp_path, distributed)
    for node in ("node0", "node1"):
        goes_on(0, tmp_path / node / "a.ckpt", ALONE)


def has_hooks(rank: int, world: int, path: Path, distributed: bool) -> None:
    module, optimizer = build(SQUARE, seed=1)
    layouts, group = packed_of(2), dist.group.WORLD
    weights = {name: value.detach().clone() for name, value in module_state(module, layouts).items()}
    averaged = {name: value for name, value in weights.items() if isinstance(value, PackedTensor)}
    parameters = dict(module.state_dict())
    assert not any(isinstance(value, PackedTensor) for value in parameters.values())
    # A hook that saves half precision, a callback that keeps copies, and a hook that asks the module itself.
    half = {name: value.half() for name, value in weights.items()}
    save_all(path / "half.ckpt", module, optimizer, SQUARE, distributed=distributed, state_dict=half, kept=averaged)
    save_all(path / "own.ckpt", module, optimizer, SQUARE, distributed=distributed, state_dict=parameters)

    expected = module_state(build(ALONE, seed=1)[0])
    stored = open_checkpoint(path / "half.ckpt", weights_only=None, group=group)
    assert stored.metadata["kept"].keys() == averaged.keys()
    assert all(torch.equal(value, expected[name]) for name, value in stored.metadata["kept"].items())
    fresh, _ = build(SQUARE, seed=2)
    read = read_module_state(stored, fresh, group=group, layouts=layouts)
    # A hook of loading puts a whole tensor, and another rank's own parameter, in the place of shards.
    whole = torch.arange(24.0).double()
    read["blocks.0.fused.bias"] = whole
    read["blocks.1.fused.bias"] = dict(module.named_parameters())["blocks.1.fused.bias"].detach()
    load_module_state(fresh, read, strict=True, layouts=layouts)
    for name, parameter in fresh.named_parameters():
        value = {"blocks.0.fused.bias": whole, "blocks.1.fused.bias": expected["blocks.1.fused.bias"]}.get(
            name, expected[name].half().double()
        )
        equal(parameter.detach(), value, SQUARE, rank, name)


@FORMATS
def test_hooks_edit_states_in_original_order(tmp_path: Path, distributed: bool) -> None:
    run_spmd(has_hooks, 4, tmp_path, distributed)
    module = build(ALONE, seed=2)[0]
    load_module(open_checkpoint(tmp_path / "own.ckpt", weights_only=None, group=None), module, strict=True, group=None)
    expected = module_state(build(ALONE, seed=1)[0])
    assert all(torch.equal(value, expected[name]) for name, value in module_state(module).items())


def refuses_state(rank: int, world: int, path: Path) -> str:
    module, _ = build(SQUARE, seed=1)
    optimizer = torch.optim.Adafactor(module.parameters(), lr=0.1)
    with pytest.raises(CheckpointError) as caught:
        load_all(path, module, optimizer, SQUARE)
    return str(caught.value)


@FORMATS
def test_state_without_an_original_order_is_refused(tmp_path: Path, distributed: bool) -> None:
    module, _ = build(ALONE, seed=1)
    optimizer = torch.optim.Adafactor(module.parameters(), lr=0.1)
    train(module, optimizer, ALONE, 0, range(1))
    save_all(tmp_path / "a.ckpt", module, optimizer, ALONE, distributed=distributed)
    errors = run_spmd(refuses_state, 4, tmp_path / "a.ckpt")
    assert len(set(errors)) == 1
    assert "blocks.0.swapped of shape (7, 24) is cut on dim 1 in 8|8|8" in errors[0]
    assert "state of shape (1, 24), whose original order is not known" in errors[0]
