"""Folders behind URLs: complete or not there, whatever stops their writing."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from lightning_3d.checkpoint import store
from lightning_3d.checkpoint.remote import MARKER, remove_remote
from lightning_3d.errors import CheckpointError
from tests.unit.checkpoint.models import Model, adamw, load_all, opened, save_all, train


@pytest.fixture(params=["memory", "local"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A URL that fsspec knows, of nothing yet."""
    root = f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"local://{tmp_path}"
    yield f"{root}/last.ckpt"
    remove_remote(root)


def content(url: str) -> list[str]:
    files, path = fsspec.core.url_to_fs(url)
    return sorted(name.rpartition("/")[2] for name in files.ls(path, detail=False))


def saved(url: str, steps: int, **metadata: Any) -> Model:
    torch.manual_seed(1)
    model = Model()
    optimizer = adamw(model)
    train(model, [optimizer], steps)
    save_all(url, model, [optimizer], distributed=True, **metadata)
    return model


def test_saves_loads_and_replaces(url: str) -> None:
    for steps in (1, 3):
        model = saved(url, steps, epoch=steps)
        other = Model()
        load_all(url, other, [adamw(other)])  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        assert opened(url).metadata == {"epoch": steps}
        # The marker and one folder: those of the save before are gone.
        assert len(content(url)) == 2
    remove_remote(url)
    remove_remote(url)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        opened(url)


@pytest.mark.parametrize("at", ["tensors", "metadata", "marker"])
def test_what_was_not_finished_is_not_loaded(url: str, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    place = {
        "tensors": "lightning_3d.checkpoint.store.write_tensors",
        "metadata": "lightning_3d.checkpoint.store.write_file",
        "marker": "lightning_3d.checkpoint.remote.write_file",
    }[at]
    with monkeypatch.context() as patch:
        patch.setattr(place, full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            saved(url, 1, epoch=0)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint|never finished"):
        opened(url)
    saved(url, 1, epoch=1)
    with monkeypatch.context() as patch:
        patch.setattr(place, full)
        with pytest.raises(CheckpointError, match="No space left on device"):
            saved(url, 2, epoch=2)
    assert opened(url).metadata == {"epoch": 1}
    assert len(content(url)) == 2


def test_a_process_that_died_leaves_what_was_there(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def killed(*args: Any) -> None:
        raise Killed

    saved(url, 1, epoch=1)
    monkeypatch.setattr("lightning_3d.checkpoint.remote._delete", lambda url: None)
    monkeypatch.setattr(store, "write_file", killed)
    with pytest.raises(Killed):
        saved(url, 2, epoch=2)
    assert len(content(url)) == 3
    assert opened(url).metadata == {"epoch": 1}
    monkeypatch.undo()
    saved(url, 2, epoch=3)
    assert len(content(url)) == 2


@pytest.mark.parametrize("name", ["../other", "/etc", "0123", "", "....////...."])
def test_the_marker_names_a_folder_inside(url: str, name: str) -> None:
    saved(url, 1)
    files, path = fsspec.core.url_to_fs(url)
    with files.open(f"{path}/{MARKER}", "wb") as stream:
        stream.write(name.encode())
    with pytest.raises(CheckpointError, match="is no folder of a checkpoint"):
        opened(url)


def test_a_copy_of_a_local_directory_loads(tmp_path: Path) -> None:
    model = saved(str(tmp_path / "a.ckpt"), 1, epoch=1)
    url = f"memory://{uuid.uuid4().hex}/a.ckpt"
    files, path = fsspec.core.url_to_fs(url)
    files.put(str(tmp_path / "a.ckpt"), path, recursive=True)
    other = Model()
    load_all(url, other, [adamw(other)])  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
