"""Whole checkpoints in one process: saved, loaded, refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io import CheckpointIO
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from omegaconf import DictConfig, OmegaConf
from torch import nn

from lightning_3d.checkpoint.gathering import full_state_dict
from lightning_3d.checkpoint.layout import module_state
from lightning_3d.checkpoint.optimizers import optimizer_state
from lightning_3d.checkpoint.restore import (
    load_module,
    load_optimizers,
    open_checkpoint,
    read_module_state,
    restore_random,
)
from lightning_3d.checkpoint.store import CheckpointState, save
from lightning_3d.checkpoint.weights import load_module_state
from lightning_3d.errors import CheckpointError
from tests.unit.checkpoint.models import CPU, FORMATS, Model, adamw, load_all, opened, save_all, train


@FORMATS
@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda model: adamw(model, foreach=True),
        lambda model: adamw(model, fused=True),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
    ],
    ids=["adamw", "foreach", "fused", "sgd", "momentum", "adafactor"],
)
def test_training_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer], distributed: bool
) -> None:
    model, other = Model(), Model()
    optimizer, fresh = make(model), make(other)
    train(model, [optimizer], 3)
    save_all(tmp_path / "a.ckpt", model, [optimizer], distributed=distributed)
    load_all(tmp_path / "a.ckpt", other, [fresh])
    assert other.head.weight is other.table.weight
    assert train(other, [fresh], 3) == train(model, [optimizer], 3)


@FORMATS
def test_saving_before_the_first_step_counts_no_step(tmp_path: Path, distributed: bool) -> None:
    model, other = Model(), Model()
    optimizer, fresh = adamw(model), adamw(other)
    save_all(tmp_path / "a.ckpt", model, [optimizer], distributed=distributed)
    assert not optimizer.state
    load_all(tmp_path / "a.ckpt", other, [fresh])
    assert train(other, [fresh], 3) == train(model, [optimizer], 3)


@FORMATS
def test_several_optimizers_and_another_order_of_parameters(tmp_path: Path, distributed: bool) -> None:
    def make(model: Model, reverse: bool) -> list[torch.optim.Optimizer]:
        norm, rest = list(model.norm.parameters()), [model.table.weight, *model.unused.parameters()]
        if reverse:
            norm, rest = norm[::-1], rest[::-1]
        groups = [{"params": rest, "weight_decay": 0.3}, {"params": norm, "lr": 0.02}]
        return [torch.optim.AdamW(groups, lr=0.1), torch.optim.SGD(model.frozen.parameters(), lr=0.5, momentum=0.9)]

    model, other = Model(), Model()
    model.frozen.requires_grad_()
    other.frozen.requires_grad_()
    ours, theirs = make(model, reverse=False), make(other, reverse=True)
    train(model, ours, 3)
    save_all(tmp_path / "a.ckpt", model, ours, distributed=distributed)
    load_all(tmp_path / "a.ckpt", other, theirs)
    assert [group["lr"] for group in theirs[0].param_groups] == [0.1, 0.02]
    assert train(other, theirs, 2) == train(model, ours, 2)


@FORMATS
def test_metadata_come_back_in_their_containers(tmp_path: Path, distributed: bool) -> None:
    config = OmegaConf.create({"lr": 0.1, "twice": "${lr}", "path": Path("data")})
    model = Model()
    metadata = {"epoch": 3, "hyper_parameters": config, "hparams_type": DictConfig, "callbacks": {"a": {"best": None}}}
    save_all(tmp_path / "a.ckpt", model, [], distributed=distributed, **metadata)
    stored = opened(tmp_path / "a.ckpt")
    assert stored.metadata == metadata
    assert OmegaConf.to_container(stored.metadata["hyper_parameters"], resolve=False)["twice"] == "${lr}"


def test_metadata_that_are_no_plain_data_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"hyper_parameters\.stream is a _io\.BytesIO"):
        save_all(tmp_path / "a.ckpt", Model(), [], distributed=True, hyper_parameters={"stream": io.BytesIO()})
    assert not list(tmp_path.iterdir())


@FORMATS
def test_weights_alone_can_be_loaded_but_not_resumed(tmp_path: Path, distributed: bool) -> None:
    model, other = Model(), Model()
    state = CheckpointState.of({"state_dict": module_state(model)})
    save(tmp_path / "a.ckpt", state, distributed=distributed, group=None)
    stored = opened(tmp_path / "a.ckpt")
    load_module(stored, other, strict=True, group=None)
    assert torch.equal(other.table.weight, model.table.weight)
    with pytest.raises(CheckpointError, match="no optimizer state"):
        load_optimizers(stored, other, [adamw(other)], group=None)
    if distributed:
        entry = next(iter((stored.tensors or {}).values()))
        of_lightning = replace(stored, tensors={**(stored.tensors or {}), "optimizer_0.state.a.exp_avg": entry})
        with pytest.raises(CheckpointError, match=r"own sharding strategies.*\n*.*lightning-3d convert .* --to mesh"):
            load_optimizers(of_lightning, other, [adamw(other)], group=None)


@FORMATS
def test_a_checkpoint_of_another_model_names_what_differs(tmp_path: Path, distributed: bool) -> None:
    model = Model()
    save_all(tmp_path / "a.ckpt", model, [adamw(model)], distributed=distributed)
    stored = opened(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match=r"of another shape .*frozen\.bias: saved \(4,\), here \(6,\)"):
        load_module(stored, Model(width=6), strict=True, group=None)
    more = nn.Sequential()
    more.add_module("table", nn.Embedding(7, 4))
    more.add_module("extra", nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"2 missing \(extra\.bias, extra\.weight\), \d+ unexpected \(frozen"):
        load_module(stored, more, strict=True, group=None)
    load_module(stored, more, strict=False, group=None)
    assert torch.equal(more.table.weight, model.table.weight)


@FORMATS
def test_other_optimizers_are_refused(tmp_path: Path, distributed: bool) -> None:
    model = Model()
    optimizer = adamw(model)
    train(model, [optimizer], 1)
    save_all(tmp_path / "a.ckpt", model, [optimizer], distributed=distributed)
    stored = opened(tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="holds 1 optimizers, configure_optimizers returned 2"):
        load_optimizers(stored, model, [adamw(model), adamw(model)], group=None)
    with pytest.raises(CheckpointError, match=r"saved ones that it does not step \(table\.weight"):
        load_optimizers(stored, model, [adamw(model.norm)], group=None)
    split = [{"params": [parameter]} for parameter in model.parameters()]
    load_optimizers(stored, model, [torch.optim.AdamW(split)], group=None)
    with pytest.raises(CheckpointError, match="steps 1 parameters that are not in the module"):
        optimizer_state(model, torch.optim.SGD([nn.Parameter(torch.zeros(2))]))


def test_a_folder_of_checkpoints_names_them_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [tmp_path / f"{name}.ckpt" for name in "bca"]
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(listed))
    with pytest.raises(CheckpointError, match="is a folder of checkpoints") as caught:
        opened(tmp_path)
    assert caught.value.valid == ["a.ckpt", "b.ckpt", "c.ckpt"]
    assert caught.value.fix == str(tmp_path / "a.ckpt")


def test_hooks_may_rename_what_was_read(tmp_path: Path) -> None:
    model, other = nn.Sequential(nn.Linear(2, 2)), nn.Sequential()
    other.add_module("renamed", nn.Linear(2, 2))
    for each in (model, other):
        each.add_module("last", nn.Linear(2, 2))
    mine, theirs = adamw(model), adamw(other)
    model(torch.ones(1, 2)).sum().backward()
    mine.step()
    save_all(tmp_path / "a.ckpt", model, [mine], distributed=True)
    stored = opened(tmp_path / "a.ckpt")
    state = read_module_state(stored, other, group=None)
    load_module_state(other, {name.replace("0.", "renamed."): value for name, value in state.items()}, strict=True)
    (part,) = load_optimizers(stored, other, [theirs], group=None)
    # What has kept its name is told too.
    assert part.restored == ("last.weight", "last.bias")
    assert part.converted == ("0.weight: renamed.weight", "0.bias: renamed.bias")
    assert torch.equal(other.renamed.weight, model[0].weight)
    assert torch.equal(theirs.state[other.renamed.bias]["exp_avg"], mine.state[model[0].bias]["exp_avg"])


@FORMATS
def test_compiled_modules_and_extra_state(tmp_path: Path, distributed: bool) -> None:
    class Counter(nn.Linear):
        count = 0

        def get_extra_state(self) -> dict[str, int]:
            return {"count": self.count}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    plain, compiled = nn.Sequential(Counter(2, 2)), nn.Sequential(torch.compile(Counter(2, 2), backend="eager"))
    compiled[0].count = 5
    save_all(tmp_path / "a.ckpt", compiled, [adamw(compiled)], distributed=distributed)
    load_all(tmp_path / "a.ckpt", plain, [adamw(plain)])
    assert plain[0].count == 5
    assert torch.equal(plain[0].weight, compiled[0].weight)


def test_tied_tensors_are_stored_once_and_lightning_consolidates(tmp_path: Path) -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(500, 50)
            self.head = nn.Linear(50, 500, bias=False)
            self.head.weight = self.table.weight

    model = Wide()
    optimizer = adamw(model)
    save_all(tmp_path / "a.ckpt", model, [optimizer], distributed=True, epoch=2)
    assert sum(file.stat().st_size for file in (tmp_path / "a.ckpt").iterdir()) < 1.5 * 500 * 50 * 4
    whole = _load_distributed_checkpoint(tmp_path / "a.ckpt")
    assert whole["epoch"] == 2
    model.load_state_dict(whole["state_dict"])
    assert set(whole["state_dict"]) == {"table.weight", "head.weight"}
    save_all(tmp_path / "b.ckpt", model, [optimizer], distributed=False)
    assert (tmp_path / "b.ckpt").stat().st_size < 1.5 * 500 * 50 * 4


def test_what_the_state_dict_leaves_out_stays(tmp_path: Path) -> None:
    class Adapters(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.adapter = nn.Linear(2, 2), nn.Linear(2, 2)

        def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {name: value for name, value in super().state_dict(*args, **kwargs).items() if "adapter" in name}

    model, other = Adapters(), Adapters()
    base = other.base.weight.detach().clone()
    save_all(tmp_path / "a.ckpt", model, [], distributed=True)
    load_module(opened(tmp_path / "a.ckpt"), other, strict=False, group=None)
    assert torch.equal(other.adapter.weight, model.adapter.weight)
    assert torch.equal(other.base.weight, base)


def test_random_states(tmp_path: Path) -> None:
    import random

    import numpy as np

    save_all(tmp_path / "a.ckpt", Model(), [], distributed=True)
    stored = opened(tmp_path / "a.ckpt")
    drawn = [
        restore_random(stored, rank=0, world=1, device=CPU) or (random.random(), np.random.rand(), torch.rand(1).item())
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]
    # Where more ranks go on, all have the states of the first.
    restore_random(stored, rank=1, world=2, device=CPU)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == drawn[0]


def test_urls(tmp_path: Path) -> None:
    import fsspec

    model, other = Model(), Model()
    state = CheckpointState.of({"state_dict": module_state(model), "optimizer_states": []})
    save("memory://runs/a.ckpt", state, distributed=False, group=None)
    assert fsspec.filesystem("memory").exists("/runs/a.ckpt")
    stored = open_checkpoint("memory://runs/a.ckpt", weights_only=None, group=None)
    load_module(stored, other, strict=True, group=None)
    assert torch.equal(other.table.weight, model.table.weight)


class Kept(CheckpointIO):
    """Keeps checkpoints in memory."""

    def __init__(self) -> None:
        self.saved: dict[str, tuple[Any, Any]] = {}

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.saved[path] = (checkpoint, storage_options)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        assert weights_only
        return dict(self.saved[str(path)][0])

    def remove_checkpoint(self, path: Any) -> None:
        del self.saved[path]


@pytest.mark.parametrize("distributed", [True, False], ids=["directory", "file"])
def test_a_writer_of_the_users_own_gets_the_whole(tmp_path: Path, distributed: bool) -> None:
    model, other, kept = Model(), Model(), Kept()
    state = CheckpointState.of({"epoch": 3, "state_dict": module_state(model), "optimizer_states": []})
    path = str(tmp_path / "a.ckpt")
    save(path, state, distributed=distributed, group=None, writer=kept, storage_options="mine")
    assert [*tmp_path.iterdir()] == []
    assert kept.saved[path][1] == "mine"
    stored = open_checkpoint(path, weights_only=None, group=None, reader=kept)
    assert stored.metadata == {"epoch": 3}
    load_module(stored, other, strict=True, group=None)
    assert torch.equal(other.table.weight, model.table.weight)
    # What is a directory of ours needs no reader.
    save(path, state, distributed=True, group=None)
    assert open_checkpoint(path, weights_only=None, group=None, reader=Kept()).metadata == {"epoch": 3}
    with pytest.raises(CheckpointError, match=r"could not open the checkpoint .*b\.ckpt: KeyError"):
        open_checkpoint(tmp_path / "b.ckpt", weights_only=None, group=None, reader=kept)


def test_a_local_url_is_a_path(tmp_path: Path) -> None:
    model = Model()
    save_all(f"file://{tmp_path}/a.ckpt", model, [], distributed=True)
    assert (tmp_path / "a.ckpt" / "meta.pt").is_file()
    assert opened(f"file://{tmp_path}/a.ckpt").whole is None


def test_full_state_dict() -> None:
    model = Model()
    full = full_state_dict(model, keep=True)
    assert full.keys() == model.state_dict().keys()
    assert full["head.weight"] is full["table.weight"]
    assert full_state_dict(model, keep=False) == {}
