"""A name holds a whole checkpoint at every instant."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_3d.checkpoint import files
from lightning_3d.checkpoint.files import Disk, atomic_path, find_disk, publish, remove, resolve
from lightning_3d.errors import CheckpointError
from tests.marks import more

ALONE = Disk(rank=0, leader=0, leaders=(0,))


def write(path: Path, value: str, directory: bool) -> None:
    if directory:
        path.mkdir(exist_ok=True)
        for name in ("one", "two"):
            (path / name).write_text(value)
    else:
        path.write_text(value * 2)


def read(path: Path) -> str:
    if path.is_dir():
        one, two = ((path / name).read_text() for name in ("one", "two"))
        assert one == two
        return one
    text = path.read_text()
    half = len(text) // 2
    assert text[:half] == text[half:]
    return text[:half]


def replace(target: Path, value: str, directory: bool) -> None:
    with atomic_path(target, ALONE, None, directory=directory) as temporary:
        write(temporary, value, directory)


@pytest.fixture(params=[True, False], ids=["exchange", "aside"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the system's exchange of names, and without."""
    if not request.param:
        monkeypatch.setattr(files, "_exchange", lambda one, other: False)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("new", [True, False], ids=["to directory", "to file"])
@pytest.mark.parametrize("old", [True, False, None], ids=["directory", "file", "nothing"])
def test_replaces_whatever_stood_there(tmp_path: Path, old: bool | None, new: bool) -> None:
    target = tmp_path / "last.ckpt"
    if old is not None:
        write(target, "old", old)
    replace(target, "new", new)
    assert read(target) == "new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.usefixtures("way")
def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    write(tmp_path / "best.ckpt", "best", True)
    (tmp_path / "last.ckpt").symlink_to("best.ckpt")
    replace(tmp_path / "last.ckpt", "new", True)
    assert (read(tmp_path / "last.ckpt"), read(tmp_path / "best.ckpt")) == ("new", "best")


def test_the_system_can_exchange_names_here(tmp_path: Path) -> None:
    write(tmp_path / "a", "a", True)
    write(tmp_path / "b", "b", False)
    if not files._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange names")
    assert (read(tmp_path / "a"), read(tmp_path / "b")) == ("b", "a")
    with pytest.raises(FileNotFoundError):
        files._exchange(tmp_path / "a", tmp_path / "nothing")


@pytest.mark.parametrize("directory", [True, False])
def test_a_failure_keeps_the_old_one(tmp_path: Path, directory: bool) -> None:
    target = tmp_path / "last.ckpt"
    replace(target, "old", directory)

    def fill_the_disk() -> None:
        with atomic_path(target, ALONE, None, directory=directory) as temporary:
            write(temporary, "new", directory)
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"could not write the checkpoint .*No space left") as caught:
        fill_the_disk()
    assert isinstance(caught.value.__cause__, OSError)
    assert read(target) == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.ckpt"]


def test_an_interrupt_keeps_the_old_one(tmp_path: Path) -> None:
    replace(tmp_path / "a", "old", True)
    with pytest.raises(KeyboardInterrupt), atomic_path(tmp_path / "a", ALONE, None, directory=True):
        raise KeyboardInterrupt
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_crash_between_two_renames_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "last.ckpt"
    write(target, "old", True)
    write(tmp_path / "last.ckpt.tmp-7", "new", True)
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    rename, renamed = Path.rename, []

    def rename_once(self: Path, other: Path) -> Path:
        if renamed:
            raise SystemExit
        renamed.append(other)
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", rename_once)
    with pytest.raises(SystemExit):
        publish(tmp_path / "last.ckpt.tmp-7", target)
    monkeypatch.setattr(Path, "rename", rename)
    assert not target.exists()
    assert read(resolve(target)) == "old"
    replace(target, "newer", True)
    assert [read(entry) for entry in tmp_path.iterdir()] == ["newer"]


_LOOP = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.unit.checkpoint.test_files import files, replace
if {aside}:
    files._exchange = lambda one, other: False
for number in range(10_000):
    replace(Path({target!r}), str(number).zfill(400), {directory})
    print(number, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("directory", [True, more(False)], ids=["directory", "file"])
@pytest.mark.parametrize("aside", [False, True], ids=["exchange", "aside"])
def test_killed_at_any_moment(tmp_path: Path, directory: bool, aside: bool) -> None:
    target = tmp_path / "last.ckpt"
    code = _LOOP.format(root=os.getcwd(), target=str(target), directory=directory, aside=aside)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(3):
            assert process.stdout.readline()
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        last = [2, *map(int, process.stdout.read().split())][-1]
    assert int(read(resolve(target))) in (last, last + 1)


def test_remove(tmp_path: Path) -> None:
    write(tmp_path / "a", "a", True)
    write(tmp_path / "b", "b", False)
    for name in ("a", "b", "a"):
        remove(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_one_process_is_its_own_leader(tmp_path: Path) -> None:
    disk = find_disk(tmp_path / "new" / "directory", None)
    assert disk == ALONE
    assert disk.shared
    assert disk.leads
    assert not list((tmp_path / "new" / "directory").iterdir())


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not write into .*file/x: NotADirectoryError"):
        find_disk(tmp_path / "file" / "x", None)


def test_a_probe_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch: Callable[..., None] = Path.touch

    def fail(self: Path, *args: object, **kwargs: object) -> None:
        touch(self)
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", fail)
    with pytest.raises(CheckpointError, match="Permission denied"):
        find_disk(tmp_path, None)
    assert not list(tmp_path.iterdir())
