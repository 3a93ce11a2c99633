"""A job that torchrun starts again after a failure: it goes on from the newest checkpoint that it has saved itself.

What a job has saved it notes in the directory that the agent of each node keeps for the errors of its processes. That
directory is the agent's alone and outlives the processes, so no earlier job is ever taken for this one, and agents that
are started with the same id are not either.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_3d.checkpoint.agreement import gather
from lightning_3d.checkpoint.files import is_remote, local_path, resolve
from lightning_3d.checkpoint.remote import finished_folder, read_file, version
from lightning_3d.checkpoint.store import META_FILE
from lightning_3d.errors import CheckpointError
from lightning_3d.graph.calls import shadow

_NOTES = "lightning_3d.json"
_FITS = "lightning_3d.fits"
_KEPT = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint that the job has begun to save.

    Attributes:
        path: As it was named.
        fit: Number of the fit in the program, from 0.
        step: The step of training.
        before: What tells apart whatever stood there when the job first wrote to it; None if nothing did.
    """

    path: str
    fit: int
    step: int
    before: tuple[int | str, ...] | None = None

    @property
    def found_step(self) -> int | None:
        """The step of the whole checkpoint of this job that lies there now; None if there is none."""
        try:
            place = self.path if is_remote(self.path) else resolve(local_path(self.path))
            return None if _identity(place) == self.before else self._step_at(place)
        except Exception:
            # Whatever cannot be read is no checkpoint to go on from.
            return None

    def _step_at(self, place: str | Path) -> int:
        source: Any = place
        if isinstance(place, str):
            folder = finished_folder(place)
            if folder is None:
                # A file is there whole or not at all; to look into it would be to fetch all of it.
                return self.step
            source = BytesIO(read_file(f"{folder}/{META_FILE}"))
        elif place.is_dir():
            source = place / META_FILE
        found = torch.load(source, map_location="cpu", weights_only=True, mmap=source is place)
        return int(found["global_step"])


class Restarts:
    """What this attempt of a job notes for the next one, and knows of those before.

    Args:
        group: All ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._own = _own_directory()
        agent = agent_directory()
        self._notes = None if agent is None else agent / _NOTES
        self._writes = os.environ.get("LOCAL_RANK") == "0"
        self._fit = 0

    def begin_fit(self, trainer: Trainer) -> None:
        """Has a Trainer that begins to fit go on from what earlier attempts have saved. A collective.

        Raises:
            CheckpointError: On every rank: each checkpoint of the job is missing on some rank.
        """
        self._fit = self._next_fit()
        found = self._newest()
        if found is None:
            return
        path, step = found
        connector: Any = trainer._checkpoint_connector
        plain = connector.resume_start

        def resume_start(checkpoint_path: Any = None, weights_only: bool | None = None) -> None:
            undo()
            instead = f" instead of ckpt_path={checkpoint_path}" if checkpoint_path not in (None, path) else ""
            rank_zero_info("this job was started again: it goes on from step %d, from %s%s", step, path, instead)
            plain(path, weights_only)

        undo = shadow(connector, "resume_start", resume_start)

    def saving(self, path: str, checkpoint: Mapping[str, Any]) -> None:
        """Notes that a checkpoint is about to be saved; one of weights alone is none to go on from."""
        if self._notes is None or not self._writes or "optimizer_states" not in checkpoint:
            return
        known = self._noted()
        earlier = next((each for each in known if each.path == path), None)
        before = _identity(path if is_remote(path) else local_path(path)) if earlier is None else earlier.before
        entry = Saved(path=path, fit=self._fit, step=int(checkpoint["global_step"]), before=before)
        kept = [*(each for each in known if each.path != path), entry][-_KEPT:]
        with suppress(OSError):
            temporary = self._notes.with_suffix(".tmp")
            temporary.write_text(json.dumps([asdict(each) for each in kept]))
            temporary.replace(self._notes)

    def _next_fit(self) -> int:
        """The number of the fit that begins, from 0, counted where the attempt has its own directory."""
        if self._own is None:
            return 0
        file = self._own / _FITS
        with suppress(OSError):
            number = int(file.read_text()) + 1 if file.exists() else 0
            file.write_text(str(number))
            return number
        return 0

    def _noted(self) -> list[Saved]:
        if self._notes is None or not self._notes.exists():
            return []
        found = json.loads(self._notes.read_text())
        return [Saved(**{**each, "before": each["before"] and tuple(each["before"])}) for each in found]

    def _newest(self) -> tuple[str, int] | None:
        own = {each.path: each for each in self._noted() if each.fit == self._fit}
        everyone = gather(self._group, list(own.values()))
        # A node that has joined later knows what the others have noted.
        known = {each.path: each for noted in everyone for each in noted} | own
        seen = gather(self._group, {path: each.found_step for path, each in known.items()})
        return newest_of(seen)


def newest_of(seen: Iterable[Mapping[str, int | None]]) -> tuple[str, int] | None:
    """Returns the newest checkpoint that every rank sees, and its step; None if no rank sees any.

    Args:
        seen: For each rank, the step of what lies at every path; None where nothing does.

    Raises:
        CheckpointError: Some ranks see checkpoints, and no checkpoint is seen by all.
    """
    ranks = list(seen)
    common = [
        (step, path) for path, step in ranks[0].items() if step is not None and all(r[path] == step for r in ranks)
    ]
    if common:
        step, path = max(common, key=lambda entry: entry[0])
        return path, step
    some = {path: step for each in ranks for path, step in each.items() if step is not None}
    if not some:
        return None
    path = max(some, key=lambda each: some[each])
    without = ", ".join(str(rank) for rank, each in enumerate(ranks) if each[path] != some[path])
    raise CheckpointError(
        f"this job was started again, and its newest checkpoint {path} of step {some[path]} is not on ranks {without}",
        fix="save to storage that all nodes mount, or copy that checkpoint to the nodes that lack it",
    )


def agent_directory() -> Path | None:
    """Returns the directory that the agent of torchrun has for one job, on this node; None without one."""
    own = _own_directory()
    return None if own is None else own.parents[1]


def _own_directory() -> Path | None:
    # <directory of the agent>/attempt_<n>/<local rank>/error.json
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(error_file).parent if error_file else None


def _identity(place: str | Path) -> tuple[int | str, ...] | None:
    """What tells a checkpoint from another one of the same name; None if there is none."""
    try:
        if isinstance(place, str):
            return (version(place),)
        status = place.stat()
    # What a file system behind a URL raises is its own affair.
    except Exception:
        return None
    return status.st_ino, status.st_mtime_ns
