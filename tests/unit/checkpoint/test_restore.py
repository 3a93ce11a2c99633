"""Checkpoints that are missing, damaged, foreign or hostile."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from lightning_3d.checkpoint.files import resolve
from lightning_3d.checkpoint.restore import load_module
from lightning_3d.errors import CheckpointError
from tests.unit.checkpoint.models import FORMATS, Model, opened, save_all


@FORMATS
def test_foreign_pickles_are_refused_unless_asked_for(tmp_path: Path, distributed: bool) -> None:
    path = tmp_path / "a.ckpt"
    model = Model()
    config = OmegaConf.create({"lr": 0.1})
    if distributed:
        save_all(path, model, [], distributed=True)
        torch.save({"hyper_parameters": config}, path / "meta.pt")
    else:
        torch.save({"hyper_parameters": config, "state_dict": model.state_dict()}, path)
    with pytest.raises(CheckpointError, match="weights_only=False"):
        opened(path)
    assert opened(path, weights_only=False).metadata["hyper_parameters"] == config


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("/tmp/lightning_3d_must_not_exist"),))


def test_an_index_cannot_run_code_or_leave_the_directory(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save_all(path, Model(), [], distributed=True)
    index = path / ".metadata"
    original = pickle.loads(index.read_bytes())
    index.write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointError, match=r"not the index of a checkpoint: .*Path\.touch"):
        opened(path)
    assert not Path("/tmp/lightning_3d_must_not_exist").exists()
    for name in ("../secret", "/etc/passwd"):
        next(iter(original.storage_data.values())).relative_path = name
        index.write_bytes(pickle.dumps(original))
        with pytest.raises(CheckpointError, match="names a file outside the checkpoint"):
            opened(path)


def _with_index(path: Path, change: Callable[[Any], None]) -> None:
    index = path / ".metadata"
    content = pickle.loads(index.read_bytes())
    change(content)
    index.write_bytes(pickle.dumps(content))


@pytest.mark.parametrize(
    "name", ["sub/../../secret", "..", "/etc/passwd", "file:///etc/passwd", "memory://secret", "link", "folder/secret"]
)
def test_names_in_an_index_stay_inside(tmp_path: Path, name: str) -> None:
    """Links are followed: what they lead to is outside too."""
    path = tmp_path / "a.ckpt"
    model = Model()
    save_all(path, model, [], distributed=True)
    shutil.copytree(path, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "secret").write_bytes((path / "__0_0.distcp").read_bytes())
    (path / "link").symlink_to(tmp_path / "elsewhere" / "secret")
    (path / "folder").symlink_to(tmp_path / "elsewhere")

    def leave(index: Any) -> None:
        for entry in index.storage_data.values():
            entry.relative_path = name

    _with_index(path, leave)
    with pytest.raises(CheckpointError, match="names a file outside the checkpoint"):
        opened(path)


def test_a_link_to_a_checkpoint_is_one(tmp_path: Path) -> None:
    save_all(tmp_path / "a.ckpt", Model(), [], distributed=True)
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "a.ckpt")
    load_module(opened(tmp_path / "last.ckpt"), Model(), strict=True, group=None)


class Evaluates:
    def __reduce__(self) -> tuple[Any, ...]:
        return (eval, ("__import__('pathlib').Path('/tmp/lightning_3d_must_not_exist').touch()",))


@pytest.mark.parametrize("place", ["storage_data", "planner_data", "state_dict_metadata"])
@pytest.mark.parametrize("payload", [Payload, Evaluates])
def test_an_index_with_code_in_it_runs_none(tmp_path: Path, place: str, payload: type) -> None:
    path = tmp_path / "a.ckpt"
    save_all(path, Model(), [], distributed=True)
    _with_index(path, lambda index: setattr(index, place, {**getattr(index, place), "x": payload()}))
    with pytest.raises(CheckpointError, match="not the index of a checkpoint"):
        opened(path)
    assert not Path("/tmp/lightning_3d_must_not_exist").exists()


def test_tensors_with_code_in_them_run_none(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    save_all(path, Model(), [], distributed=True)
    torch.save(Payload(), path / "__0_0.distcp")
    size = (path / "__0_0.distcp").stat().st_size

    def whole_file(index: Any) -> None:
        for entry in index.storage_data.values():
            entry.offset, entry.length = 0, size

    _with_index(path, whole_file)
    with pytest.raises(CheckpointError, match="could not read the checkpoint"):
        load_module(opened(path), Model(), strict=True, group=None)
    assert not Path("/tmp/lightning_3d_must_not_exist").exists()


def _remove(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


def _truncate(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:200])


@pytest.mark.parametrize(
    "damage",
    [_remove(".metadata"), _remove("meta.pt"), _truncate(".metadata"), _truncate("meta.pt"), _truncate("__0_0.distcp")],
    ids=["no index", "no metadata", "half index", "half metadata", "half shard"],
)
def test_damaged_directories_are_one_error(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = tmp_path / "a.ckpt"
    save_all(path, Model(), [], distributed=True)
    damage(path)
    with pytest.raises(CheckpointError, match=r"a\.ckpt") as caught:
        load_module(opened(path), Model(), strict=True, group=None)
    assert caught.value.fix is not None


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 no zip"])
def test_files_that_are_no_checkpoints(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.ckpt"):
        opened(tmp_path / "a.ckpt")
    torch.save([1, 2], tmp_path / "b.ckpt")
    with pytest.raises(CheckpointError, match="holds no state_dict"):
        opened(tmp_path / "b.ckpt")


def test_a_newer_format_is_named(tmp_path: Path) -> None:
    save_all(tmp_path / "a.ckpt", Model(), [], distributed=False)
    content = torch.load(tmp_path / "a.ckpt")
    content["lightning_3d"]["format"] = 99
    torch.save(content, tmp_path / "a.ckpt")
    with pytest.raises(CheckpointError, match="has format 99"):
        opened(tmp_path / "a.ckpt")


def test_names_that_do_not_exist(tmp_path: Path) -> None:
    save_all(tmp_path / "epoch=3.ckpt", Model(), [], distributed=True)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*epoch=4\.ckpt") as caught:
        opened(tmp_path / "epoch=4.ckpt")
    assert "epoch=3.ckpt" in str(caught.value)
    shutil.copytree(tmp_path / "epoch=3.ckpt", tmp_path / "last.ckpt.tmp-abc")
    with pytest.raises(CheckpointError, match="writing never finished"):
        resolve(tmp_path / "last.ckpt.tmp-abc")
