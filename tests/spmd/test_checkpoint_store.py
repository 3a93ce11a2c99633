"""Checkpoints of sharded, hybrid and replicated modules on gloo processes."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_3d.checkpoint.files import find_disk
from lightning_3d.checkpoint.gathering import full_state_dict
from lightning_3d.checkpoint.generators import random_state
from lightning_3d.checkpoint.layout import module_state
from lightning_3d.checkpoint.optimizers import optimizer_state
from lightning_3d.checkpoint.restore import load_module, load_optimizers, open_checkpoint, restore_random
from lightning_3d.checkpoint.store import CheckpointState, save
from lightning_3d.errors import CheckpointError
from tests.marks import more
from tests.spmd.pool import run_spmd

pytestmark = pytest.mark.spmd

CPU = torch.device("cpu")
WIDTH = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        # Shorter than most meshes, so that some ranks hold nothing of it.
        self.scale = nn.Parameter(torch.ones(1, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen += 1
        return hidden + self.frozen(torch.tanh(self.layer(hidden))) * self.scale


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def build(layout: str, seed: int) -> Decoder:
    torch.manual_seed(seed)
    model = Decoder()
    if layout == "plain":
        return model
    world = dist.get_world_size()
    names = ("data_replicate", "data_shard")
    mesh = (
        init_device_mesh("cpu", (2, world // 2), mesh_dim_names=names)
        if layout == "hybrid"
        else init_device_mesh("cpu", (world,))
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=layout != "gathered")
    fully_shard(model, mesh=mesh, reshard_after_forward=layout != "gathered")
    return model


def configure(model: Decoder, kind: str) -> list[torch.optim.Optimizer]:
    if kind == "two":
        inner = [*model.blocks[1].parameters(), *model.blocks[0].parameters()]
        groups = [{"params": inner[:5], "lr": 0.02}, {"params": inner[5:]}]
        return [torch.optim.AdamW(groups, lr=0.1), torch.optim.SGD([model.table.weight], lr=0.1, momentum=0.9)]
    if kind == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=0.1)]
    options = {} if kind == "adamw" else {kind: True}
    return [torch.optim.AdamW(model.parameters(), lr=0.1, **options)]


def train(model: nn.Module, optimizers: list[torch.optim.Optimizer], steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = torch.arange(12).mul(step + 3).remainder(11)
        loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def local(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.to_local()
    if isinstance(value, dict):
        return {key: local(part) for key, part in value.items()}
    return value


def save_all(
    path: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    *,
    distributed: bool = True,
    **metadata: Any,
) -> None:
    states = [optimizer_state(model, optimizer) for optimizer in optimizers]
    checkpoint = {**metadata, "state_dict": module_state(model), "optimizer_states": states}
    save(path, CheckpointState.of(checkpoint, random_state(CPU)), distributed=distributed, group=dist.group.WORLD)


def load_all(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    group = dist.group.WORLD
    stored = open_checkpoint(path, weights_only=None, group=group)
    load_module(stored, model, strict=True, group=group)
    load_optimizers(stored, model, optimizers, group=group)
    restore_random(stored, rank=dist.get_rank(), world=dist.get_world_size(), device=CPU)
    return stored.metadata


def same(mine: nn.Module, theirs: nn.Module) -> None:
    for (name, one), other in zip(module_state(mine).items(), module_state(theirs).values(), strict=True):
        assert type(one) is type(other), name
        assert torch.equal(local(one), local(other)), name


def resumes(rank: int, world: int, path: Path, layout: str, kind: str, distributed: bool, steps: int) -> list[float]:
    model, fresh = build(layout, seed=1), build(layout, seed=2)
    ours, theirs = configure(model, kind), configure(fresh, kind)
    train(model, ours, range(steps))
    save_all(path, model, ours, distributed=distributed, epoch=4)
    draw = torch.rand(2)
    assert load_all(path, fresh, theirs) == {"epoch": 4}
    assert torch.equal(torch.rand(2), draw)
    assert fresh.head.weight is fresh.table.weight
    same(model, fresh)
    for one, other in zip(ours, theirs, strict=True):
        before, after = optimizer_state(model, one), optimizer_state(fresh, other)
        torch.testing.assert_close(local(after["state"]), local(before["state"]), rtol=0, atol=0)
        assert after["param_groups"] == before["param_groups"]
    losses = train(model, ours, range(steps, steps + 2))
    assert train(fresh, theirs, range(steps, steps + 2)) == losses
    return losses


@pytest.mark.parametrize("distributed", [True, more(False)], ids=["directory", "file"])
def test_resumes_in_every_layout(tmp_path: Path, distributed: bool) -> None:
    cases = [
        (2, "plain", "adamw", 2),
        (2, "sharded", "two", 2),
        (2, "sharded", "fused", 2),
        (2, "gathered", "foreach", 2),
        (2, "sharded", "sgd", 1),
        (4, "hybrid", "adamw", 2),
        (4, "sharded", "adamw", 2),
        (2, "sharded", "adamw", 0),
    ]
    for number, (world, layout, kind, steps) in enumerate(cases):
        path = tmp_path / f"{number}.ckpt"
        losses = run_spmd(resumes, world, path, layout, kind, distributed, steps)
        assert all(one == losses[0] for one in losses), (layout, kind)
        assert path.is_dir() == distributed
    assert {entry.suffix for entry in tmp_path.iterdir()} == {".ckpt"}


def replaces(rank: int, world: int, path: Path) -> None:
    model = build("sharded", seed=1)
    optimizers = configure(model, "adamw")
    for step in range(3):
        train(model, optimizers, range(step, step + 1))
        save_all(path, model, optimizers, epoch=step)
    fresh = build("sharded", seed=2)
    assert load_all(path, fresh, configure(fresh, "adamw")) == {"epoch": 2}
    same(model, fresh)


def test_replacing_the_same_name(tmp_path: Path) -> None:
    run_spmd(replaces, 2, tmp_path / "last.ckpt")
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def holds_shards_elsewhere(rank: int, world: int, path: Path) -> None:
    model = build("sharded", seed=1)
    averaged = {name: tensor.clone() for name, tensor in module_state(model).items() if isinstance(tensor, DTensor)}
    save_all(path, model, [], averaged=averaged)
    found = open_checkpoint(path, weights_only=None, group=dist.group.WORLD).metadata["averaged"]
    whole = full_state_dict(model, keep=True)
    assert found.keys() == averaged.keys()
    assert all(torch.equal(found[name], whole[name]) for name in found)
    assert full_state_dict(model, keep=False) == {}


def test_shards_in_the_metadata_come_back_whole(tmp_path: Path) -> None:
    run_spmd(holds_shards_elsewhere, 2, tmp_path / "a.ckpt")


def fails(rank: int, world: int, path: Path, how: str, distributed: bool) -> str:
    model = build("sharded", seed=1)
    optimizers = configure(model, "adamw")
    train(model, optimizers, range(1))
    save_all(path, model, optimizers, distributed=distributed, epoch=0)
    train(model, optimizers, range(1))

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    torch_save = torch.save

    def full_for_files(value: Any, target: Any, **options: Any) -> None:
        # Tensors also go through torch.save on their way between processes.
        full() if isinstance(target, Path) else torch_save(value, target, **options)

    metadata: dict[str, Any] = {"epoch": 1}
    with pytest.MonkeyPatch.context() as patch:
        if how == "rank 1 is full" and rank == 1:
            patch.setattr(FileSystemWriter, "write_data", full)
        if how == "metadata" and rank == 0:
            patch.setattr(torch, "save", full_for_files)
            patch.setattr(Path, "write_bytes", full)
        if how == "rename" and rank == 0:
            patch.setattr(os, "fsync", full)
        if how == "container" and rank == 1:
            metadata["callback"] = io.BytesIO()
        start = time.monotonic()
        with pytest.raises(CheckpointError) as caught:
            save_all(path, model, optimizers, distributed=distributed, **metadata)
        assert time.monotonic() - start < 10
    fresh = build("sharded", seed=2)
    assert load_all(path, fresh, configure(fresh, "adamw")) == {"epoch": 0}
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "distributed", "text"),
    [
        ("rank 1 is full", True, "rank 1: OSError: [Errno 28] No space left on device"),
        ("metadata", True, "rank 0: OSError: [Errno 28] No space left on device"),
        ("metadata", False, "rank 0: OSError: [Errno 28] No space left on device"),
        ("rename", True, "rank 0: OSError: [Errno 28] No space left on device"),
        ("container", True, "rank 1: callback is a _io.BytesIO"),
        ("container", False, "rank 1: callback is a _io.BytesIO"),
    ],
)
def test_a_failure_on_one_rank_is_everyones_error(tmp_path: Path, how: str, distributed: bool, text: str) -> None:
    errors = run_spmd(fails, 2, tmp_path / "last.ckpt", how, distributed)
    assert errors[0] == errors[1]
    assert text in errors[0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def reads_damage(rank: int, world: int, path: Path) -> str:
    model = build("sharded", seed=1)
    save_all(path, model, configure(model, "adamw"))
    if rank == 1:
        shard = path / "__1_0.distcp"
        shard.write_bytes(shard.read_bytes()[:100])
    dist.barrier()
    fresh = build("sharded", seed=2)
    with pytest.raises(CheckpointError) as caught:
        load_all(path, fresh, configure(fresh, "adamw"))
    mine = path if rank == 0 else path.with_name("other.ckpt")
    with pytest.raises(CheckpointError, match=r"rank 1: there is no checkpoint .*other\.ckpt"):
        open_checkpoint(mine, weights_only=None, group=dist.group.WORLD)
    return str(caught.value)


def test_a_damaged_shard_is_everyones_error(tmp_path: Path) -> None:
    errors = run_spmd(reads_damage, 2, tmp_path / "a.ckpt")
    assert errors[0] == errors[1]
    assert "could not read the checkpoint" in errors[0]


def on_local_disks(rank: int, world: int, directory: Path, distributed: bool) -> list[float]:
    node = directory / f"node{rank // 2}"
    disk = find_disk(node, dist.group.WORLD)
    assert (disk.leader, disk.leaders) == (rank // 2 * 2, (0, 2))
    model, fresh = build("sharded", seed=1), build("sharded", seed=2)
    ours, theirs = configure(model, "adamw"), configure(fresh, "adamw")
    train(model, ours, range(2))
    save_all(node / "last.ckpt", model, ours, distributed=distributed)
    load_all(node / "last.ckpt", fresh, theirs)
    same(model, fresh)
    losses = train(model, ours, range(2, 4))
    assert train(fresh, theirs, range(2, 4)) == losses
    return losses


@pytest.mark.parametrize("distributed", [True, False], ids=["directory", "file"])
def test_disks_of_their_own_hold_whole_checkpoints(tmp_path: Path, distributed: bool) -> None:
    losses = run_spmd(on_local_disks, 4, tmp_path, distributed)
    for node in ("node0", "node1"):
        assert [entry.name for entry in (tmp_path / node).iterdir()] == ["last.ckpt"]
        # Complete means that one process can go on from it.
        alone = Decoder()
        optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
        stored = open_checkpoint(tmp_path / node / "last.ckpt", weights_only=None, group=None)
        load_module(stored, alone, strict=True, group=None)
        load_optimizers(stored, alone, [optimizer], group=None)
        assert train(alone, [optimizer], range(2, 4)) == pytest.approx(losses[0], rel=1e-5)


class Lit(L.LightningModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Decoder()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch), batch.roll(1))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(list(self.parameters())[::-1], lr=self.hparams["lr"])
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def one_device(directory: Path, steps: int, resume: Path | None = None) -> Lit:
    data = DataLoader(torch.arange(88).mul(3).remainder(11), batch_size=11)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="auto",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    torch.manual_seed(3)
    model = Lit()
    trainer.fit(model, data, ckpt_path=resume)
    trainer.save_checkpoint(directory / f"{steps}.ckpt")
    return model


def passes_through(rank: int, world: int, source: Path, target: Path) -> None:
    torch.manual_seed(5)
    model = Lit()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model.net, mesh=mesh)
    optimizer = torch.optim.AdamW(list(model.parameters())[::-1], lr=1.0)
    metadata = load_all(source, model, [optimizer])
    save_all(target, model, [optimizer], distributed=False, **metadata)


@pytest.mark.filterwarnings("ignore:.*will result in duplicate:UserWarning")
def test_one_device_lightning_and_shards_exchange_files(tmp_path: Path) -> None:
    one_device(tmp_path, 8)
    run_spmd(passes_through, 2, tmp_path / "8.ckpt", tmp_path / "through.ckpt")
    before, after = torch.load(tmp_path / "8.ckpt"), torch.load(tmp_path / "through.ckpt")
    ours = after.pop("lightning_3d")
    assert ours["format"] == 1
    for key in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(after.pop(key), before.pop(key), rtol=0, atol=0)
    assert after == before
    direct = one_device(tmp_path, 10, tmp_path / "8.ckpt")
    through = one_device(tmp_path, 10, tmp_path / "through.ckpt")
    for one, other in zip(direct.parameters(), through.parameters(), strict=True):
        assert torch.equal(one, other)
    assert Lit.load_from_checkpoint(tmp_path / "through.ckpt").hparams["lr"] == 0.1
