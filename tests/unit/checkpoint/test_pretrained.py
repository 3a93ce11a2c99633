"""Pretrained weights that fit, that are of another model, and files that are damaged or hostile."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_3d.checkpoint.matching import common_beginning, match
from lightning_3d.checkpoint.pretrained import PretrainedReport, load_pretrained, open_weights
from lightning_3d.errors import CheckpointError


class Net(nn.Module):
    """A tied head, a persistent buffer and one that is computed."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(8, width), nn.Linear(width, 8, bias=False)
        self.head.weight = self.words.weight
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("mask", torch.ones(2), persistent=False)


class Holder(nn.Module):
    def __init__(self, **more: nn.Module) -> None:
        super().__init__()
        self.net = Net()
        for name, part in more.items():
            self.add_module(name, part)


def weights(seed: int = 0, tied: bool = True) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    state = {name: torch.randn_like(value.float()).to(value.dtype) for name, value in Net().state_dict().items()}
    return {name: value for name, value in state.items() if not tied or name != "head.weight"}


def load(module: nn.Module, path: Path, strict: bool = True) -> PretrainedReport:
    return load_pretrained(module, path, strict=strict, group=None)


def save_index(directory: Path, files: dict[str, dict[str, Tensor]], **named: str) -> None:
    for file, tensors in files.items():
        save_file(tensors, directory / file)
    listed = {name: file for file, tensors in files.items() for name in tensors} | named
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def test_finds_where_the_model_is(tmp_path: Path) -> None:
    stored = weights()
    save_file({**stored, "mask": torch.zeros(2)}, tmp_path / "model.safetensors")
    module = Holder()
    report = load(module, tmp_path)
    assert (report.missing, report.unexpected, report.matching.added) == ((), (), "net.")
    assert "with 'net.' put before their names" in str(report)
    assert all(torch.equal(module.net.state_dict()[name], value) for name, value in stored.items())
    assert module.net.head.weight is module.net.words.weight
    assert module.net.mask.sum() == 2


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    stored = weights()
    names = sorted(stored)
    files = {"a.safetensors": {n: stored[n] for n in names[:2]}, "b.safetensors": {n: stored[n] for n in names[2:]}}
    save_index(tmp_path, files)
    save_file(weights(seed=1), tmp_path / "consolidated.safetensors")
    module = Net()
    load(module, tmp_path)
    assert all(torch.equal(module.state_dict()[name], value) for name, value in stored.items())


def test_names_that_match_nothing_are_named(tmp_path: Path) -> None:
    stored = weights()
    del stored["norm.bias"]
    save_file({**stored, "pooler.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    expected = r"stored values \(net.norm.bias\); 1 stored have no place in it \(pooler.weight\)"
    with pytest.raises(CheckpointError, match=expected) as caught:
        load(Holder(), tmp_path)
    assert "pretrained_strict=False" in str(caught.value)
    module = Holder()
    report = load(module, tmp_path, strict=False)
    assert (report.missing, report.unexpected) == (("net.norm.bias",), ("pooler.weight",))
    assert torch.equal(module.net.norm.bias, torch.zeros(4))
    assert torch.equal(module.net.norm.weight, stored["norm.weight"])


def test_other_sizes_kinds_and_ties_are_named(tmp_path: Path) -> None:
    save_file(weights(tied=False), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"words.weight: stored \(8, 4\) torch.float32, here \(8, 6\)"):
        load(Net(width=6), tmp_path, strict=False)
    with pytest.raises(CheckpointError, match=r"different values for .* which are one parameter"):
        load(Net(), tmp_path)
    save_file({"weight": torch.ones(3, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"stored \(3, 2\) torch.int8"):
        load(nn.Linear(2, 3, bias=False), tmp_path)
    save_file({"a.b": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no name in .* is one of PReLU: there is a.b"):
        load(nn.PReLU(), tmp_path, strict=False)


def test_damaged_and_hostile_directories(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load(Net(), tmp_path / "nothing")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="holds no weights that can be read") as caught:
        load(Net(), tmp_path)
    assert "pytorch_model.bin" in str(caught.value)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(Net(), tmp_path)
    save_index(tmp_path, {"a.safetensors": weights()}, secret="../secret.safetensors")
    with pytest.raises(CheckpointError, match="names a file outside its directory"):
        load(Net(), tmp_path)
    save_index(tmp_path, {"a.safetensors": weights()}, lost="a.safetensors")
    with pytest.raises(CheckpointError, match=r"names 1 tensors that are not in their files \(lost\)"):
        load(Net(), tmp_path)


def test_without_safetensors_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(weights(), tmp_path / "model.safetensors")
    for name in ("safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CheckpointError, match="needs the package safetensors") as caught:
        load(Net(), tmp_path)
    assert caught.value.fix == "pip install 'lightning-3d[hf]'"


def test_a_file_of_plain_lightning(tmp_path: Path) -> None:
    source = Holder()
    torch.save({"state_dict": source.state_dict(), "pytorch-lightning_version": "2.6.6"}, tmp_path / "a.ckpt")
    opened = open_weights(tmp_path / "a.ckpt")
    assert opened.source.ties == {"net.head.weight": "net.words.weight"}
    target = Net()
    with torch.no_grad():
        source.net.words.weight.add_(1)
    assert load(target, tmp_path / "a.ckpt").matching.removed == "net."
    assert torch.equal(target.words.weight + 1, source.net.words.weight)


def test_the_place_with_most_shapes_wins() -> None:
    shape, other = torch.Size([2]), torch.Size([3])
    found = match({"a.w": shape, "b.w": other}, {"x.a.w": other, "x.b.w": shape, "y.a.w": shape, "y.b.w": other})
    assert (found.removed, found.added) == ("", "y.")
    found = match({"old.a": shape, "old.b": shape, "head": shape}, {"m.a": shape, "m.b": shape})
    assert (found.removed, found.added, dict(found.names)) == ("old.", "m.", {"old.a": "m.a", "old.b": "m.b"})
    assert common_beginning({"model.a": 1, "model.b.c": 1}) == "model."
    assert common_beginning({"model.a": 1, "scale": 1}) == ""
