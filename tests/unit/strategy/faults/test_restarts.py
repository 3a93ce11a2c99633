"""Which checkpoint a job that is started again goes on from."""

from __future__ import annotations

import os
import uuid
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_3d.checkpoint.remote import remote_folder, write_file
from lightning_3d.errors import CheckpointError
from lightning_3d.strategy.faults.restarts import Restarts, Saved, agent_directory, newest_of


class Alone:
    """Stands for a Trainer whose connector writes down what it is asked to load."""

    def __init__(self) -> None:
        self._checkpoint_connector = self
        self.loaded: list[Any] = []

    def resume_start(self, path: Any = None, weights_only: bool | None = None) -> None:
        self.loaded.append(path)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of an agent; the process belongs to its first attempt."""
    attempt(tmp_path / "agent", 0, monkeypatch)
    return tmp_path / "agent"


def attempt(directory: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    own = directory / f"attempt_{number}" / "0"
    own.mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(own / "error.json"))
    monkeypatch.setenv("LOCAL_RANK", "0")


def save(path: Path, step: int) -> dict[str, Any]:
    """Writes what a checkpoint has of its step, as whoever saves does in the end."""
    path.mkdir(parents=True, exist_ok=True)
    checkpoint = {"global_step": step, "optimizer_states": []}
    torch.save(checkpoint, path / "meta.pt")
    (path / ".metadata").touch()
    return checkpoint


def group() -> dist.ProcessGroup:
    # One process needs no group to hear of itself.
    return None  # type: ignore[return-value]


def resumed() -> Any:
    """Begins a fit and returns what it goes on from; "given" is what the user has asked for."""
    trainer: Any = Alone()
    restarts = Restarts(group())
    restarts.begin_fit(trainer)
    trainer._checkpoint_connector.resume_start("given")
    return trainer.loaded[0]


def test_without_an_agent_nothing_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert agent_directory() is None
    restarts = Restarts(group())
    restarts.saving(str(tmp_path / "a"), save(tmp_path / "a", 2))
    assert resumed() == "given"


def test_the_newest_whole_checkpoint_of_this_job_wins(
    agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restarts = Restarts(group())
    trainer: Any = Alone()
    restarts.begin_fit(trainer)
    foreign = tmp_path / "last"
    save(foreign, 900)
    for name, step in (("a", 2), ("b", 4)):
        path = tmp_path / name
        restarts.saving(str(path), {"global_step": step, "optimizer_states": []})
        save(path, step)
    # Begun, and never finished: nothing there, what an earlier job had left, weights alone.
    restarts.saving(str(tmp_path / "c"), {"global_step": 6, "optimizer_states": []})
    restarts.saving(str(foreign), {"global_step": 6, "optimizer_states": []})
    save(tmp_path / "weights", 8)
    restarts.saving(str(tmp_path / "weights"), {"global_step": 8})
    attempt(agent, 1, monkeypatch)
    assert resumed() == str(tmp_path / "b")
    # The second fit of the program is another one.
    assert resumed() == "given"


def test_a_name_that_is_used_again_stands_for_what_lies_there(
    agent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last, once = tmp_path / "last", tmp_path / "once"
    save(last, 900)
    restarts = Restarts(group())
    restarts.begin_fit(Alone())  # type: ignore[arg-type]
    for step in (2, 4):
        restarts.saving(str(last), {"global_step": step, "optimizer_states": []})
        if step == 2:
            os.rename(last, tmp_path / "gone")
            save(last, step)
    restarts.saving(str(once), {"global_step": 3, "optimizer_states": []})
    save(once, 3)
    attempt(agent, 1, monkeypatch)
    # The second save under the name was not finished: what is there is of step 2.
    assert resumed() == str(once)


def test_what_cannot_be_read_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b.ckpt").write_text("half")
    torch.save({"global_step": 5}, tmp_path / "c.ckpt")
    found = [Saved(path=str(tmp_path / name), fit=0, step=9).found_step for name in ("a", "b.ckpt", "c.ckpt", "d")]
    assert found == [None, None, 5, None]


def save_behind(url: str, step: int, *, finished: bool = True) -> None:
    """Writes a checkpoint behind a URL, or what is left of one that was begun."""
    content = BytesIO()
    torch.save({"global_step": step}, content)
    if finished:
        with remote_folder(url, None) as folder:
            write_file(f"{folder}/meta.pt", content.getvalue())
    else:
        write_file(f"{url}/0123456789ab/meta.pt", content.getvalue())


def test_behind_a_url_only_what_this_job_has_finished_counts(agent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    foreign, last, begun, file, foreign_file = (f"{root}/{name}" for name in ("foreign", "last", "begun", "f", "g"))
    save_behind(foreign, 900)
    write_file(foreign_file, b"900")
    restarts = Restarts(group())
    restarts.begin_fit(Alone())  # type: ignore[arg-type]
    for step, url in enumerate((file, last, last, foreign, foreign_file, begun), start=1):
        restarts.saving(url, {"global_step": step, "optimizer_states": []})
        if step == 1:
            write_file(file, b"1")
        if step == 2:
            save_behind(last, step)
    save_behind(begun, 6, finished=False)
    found = {each.path: each.found_step for each in restarts._noted()}
    # The second save under the name was not finished: what is there is of the first.
    assert found == {file: 1, last: 2, foreign: None, foreign_file: None, begun: None}
    attempt(agent, 1, monkeypatch)
    assert resumed() == last


def test_every_rank_must_see_it() -> None:
    assert newest_of([{"a": 2, "b": 4}, {"a": 2, "b": None}]) == ("a", 2)
    assert newest_of([{"a": 2, "b": 4}, {"a": 2, "b": 2}]) == ("a", 2)
    assert newest_of([{}, {}]) is None
    assert newest_of([{"a": None}, {"a": None}]) is None
    with pytest.raises(CheckpointError, match="newest checkpoint b of step 4 is not on ranks 1, 2"):
        newest_of([{"a": None, "b": 4}, {"a": 2, "b": None}, {"a": None, "b": None}])
