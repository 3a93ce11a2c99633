"""Between Lightning's checkpoint hooks and the store: what is opened, loaded and put back, and when."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io import CheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.agreement import together
from lightning_3d.checkpoint.background import BackgroundWriter
from lightning_3d.checkpoint.containers import to_plain
from lightning_3d.checkpoint.files import is_remote, remove
from lightning_3d.checkpoint.generators import random_state
from lightning_3d.checkpoint.members import Members
from lightning_3d.checkpoint.remote import remove_remote
from lightning_3d.checkpoint.report import LoadedPart, LoadReport
from lightning_3d.checkpoint.restore import (
    StoredCheckpoint,
    load_optimizers,
    open_checkpoint,
    random_part,
    read_module_state,
    restore_random,
)
from lightning_3d.checkpoint.store import MODULE_KEY, OPTIMIZERS_KEY, CheckpointState, save
from lightning_3d.checkpoint.structure import Structure, compared
from lightning_3d.checkpoint.weights import StateAsRead, load_module_state
from lightning_3d.log import get_logger
from lightning_3d.precision import Mesh3DPrecision
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.presence import Presence
from lightning_3d.strategy.faults.replicas import check_same_checkpoint
from lightning_3d.strategy.loaded import Origin, origin_of, parts_of

_log = get_logger(__name__)

_PRECISION_KEY = Mesh3DPrecision.__qualname__
# Under this name plain Lightning keeps the state of its loss scaler.
_LIGHTNING_PRECISION_KEY = "MixedPrecision"


class CheckpointDoor:
    """The checkpoint that a run resumes from, and the saving of its own.

    Args:
        distributed: Save a sharded directory, or one consolidated file.
        group: All ranks of the mesh.
        device: This rank's device.
        origin: The mesh.
        timeout: How long a rank waits for the others to write in the background; None to write at once.
    """

    def __init__(
        self,
        *,
        distributed: bool,
        group: dist.ProcessGroup,
        device: torch.device,
        origin: Origin,
        timeout: timedelta | None = None,
    ) -> None:
        self._distributed = distributed
        self._group = group
        self._device = device
        self._origin = origin
        self._stored: StoredCheckpoint | None = None
        self._as_read: StateAsRead | None = None
        self._parts: list[LoadedPart] = []
        self._report: LoadReport | None = None
        self._timeout = timeout
        self._background: BackgroundWriter | None = None

    @property
    def report(self) -> LoadReport | None:
        """What became of the checkpoint that was loaded last; None before one was."""
        return self._report

    def save(
        self,
        checkpoint: Mapping[str, Any],
        path: str | Path,
        layouts: Mapping[str, Layout],
        presence: Presence | None = None,
        *,
        structure: Structure,
        places: Sequence[Mapping[str, Any] | None] = (),
        writer: CheckpointIO | None = None,
        storage_options: Any = None,
    ) -> None:
        """Saves what Lightning collected, beside this rank's random states. Every rank calls it.

        Args:
            checkpoint: From Lightning's ``dump_checkpoint``.
            path: Where to.
            layouts: How the tensor axis cuts parameters, by every name that they have.
            presence: The ranks of the pipeline, None without one.
            structure: Which classes the module is made of.
            places: Where the training loaders are, in plain containers.
            writer: The user's own; see ``store.save``.
            storage_options: For the writer.
        """
        content = dict(checkpoint)
        if _PRECISION_KEY in content:
            content[_LIGHTNING_PRECISION_KEY] = content[_PRECISION_KEY]
        about = {"origin": self._origin.plain(), "structure": structure.plain()}
        state = CheckpointState.of(content, random_state(self._device), layouts, presence, places, about)
        if self._timeout is not None and self._background is None:
            self._background = BackgroundWriter(self._group, self._timeout)
        save(
            path,
            state,
            distributed=self._distributed,
            group=self._group,
            writer=writer,
            storage_options=storage_options,
            background=self._background,
        )

    def open(
        self,
        path: str | Path,
        module: nn.Module,
        layouts: Mapping[str, Layout],
        *,
        weights_only: bool | None,
        reader: CheckpointIO | None = None,
    ) -> tuple[dict[str, Any], list[Any]]:
        """Returns a checkpoint in Lightning's form, its weights laid out as the module's, and where its loaders were.

        Every rank calls it.
        """
        if self._background is not None:
            self._background.wait()
        stored = open_checkpoint(path, weights_only=weights_only, group=self._group, reader=reader)
        check_same_checkpoint(path, stored.metadata.get("global_step"), stored.random, self._group)
        self._stored, self._parts, self._report = stored, [], None
        content = dict(stored.metadata)
        if _LIGHTNING_PRECISION_KEY in content:
            content.setdefault(_PRECISION_KEY, content[_LIGHTNING_PRECISION_KEY])
        content[MODULE_KEY] = read_module_state(stored, module, group=self._group, layouts=layouts)
        self._as_read = StateAsRead.of(content[MODULE_KEY], stored.dtypes)
        # Without any, Lightning would end with an error of its own before `load_optimizers` says what is there instead.
        content[OPTIMIZERS_KEY] = stored.optimizers or []
        return content, stored.places

    def load_module(
        self,
        checkpoint: Mapping[str, Any],
        module: LightningModule,
        layouts: Mapping[str, Layout],
        *,
        strict: bool,
        structure: Structure,
        presence: Presence | None = None,
    ) -> None:
        """Loads the weights of an opened checkpoint, as hooks may have edited them. Every rank calls it."""
        assert self._stored is not None, "Lightning loads weights from a checkpoint that it has opened"
        with together(self._group, f"compare the module with {self._stored.path}", "load the checkpoint of this model"):
            saved = (self._stored.about or {}).get("structure")
            changes = compared(self._stored.path, saved, structure, strict=strict)
        weights = load_module_state(
            module, checkpoint[MODULE_KEY], strict=strict, layouts=layouts, presence=presence, as_read=self._as_read
        )
        self._as_read = None
        self._parts = [weights, changes]
        if module.trainer.state.fn != TrainerFn.FITTING:
            self._tell()

    def load_optimizers(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        layouts: Mapping[str, Layout],
        *,
        presence: Presence | None = None,
        recorded: Sequence[Sequence[Members]] | None = None,
    ) -> None:
        """Loads the optimizers' states of the opened checkpoint. Every rank calls it."""
        assert self._stored is not None, "Lightning restores optimizers from a checkpoint that it has loaded"
        self._parts += load_optimizers(
            self._stored,
            module,
            optimizers,
            group=self._group,
            layouts=layouts,
            presence=presence,
            recorded=recorded,
        )

    def begin_training(self, trainer: Trainer) -> None:
        """Puts random states back, when nothing else draws before training any more, and lets the checkpoint go."""
        stored = self._stored
        if stored is None:
            return
        restore_random(stored, rank=self._group.rank(), world=self._group.size(), device=self._device)
        self._parts.append(random_part(stored, self._group.size()))
        data, keys = self._origin.data, (_PRECISION_KEY, _LIGHTNING_PRECISION_KEY)
        self._parts += parts_of(stored.metadata, trainer, places=stored.places, data_ranks=data, scaler_keys=keys)
        self._tell()
        self._stored = None

    def _tell(self) -> None:
        """Says once what became of the checkpoint."""
        assert self._stored is not None, "it has been loaded"
        self._report = LoadReport(
            path=str(self._stored.path),
            form=self._stored.form,
            saved_on=origin_of(self._stored.about),
            loaded_on=str(self._origin),
            parts=tuple(self._parts),
        )
        if self._group.rank() == 0:
            say = rank_zero_info if self._report.complete else _log.warning
            say(self._report.line())
            _log.debug("%s", self._report)

    def finish(self, writer: CheckpointIO | None) -> None:
        """Has what is written in the background be finished, by a writer of the user's own too. Every rank calls it."""
        background, self._background = self._background, None
        if background is not None:
            background.close()
        if writer is None:
            return
        group = self._group if dist.is_initialized() else None
        with together(group, "finish writing checkpoints", "see what its CheckpointIO could not do, then save again"):
            writer.teardown()

    @staticmethod
    def check_hyper_parameters(*owners: object) -> None:
        """Refuses hyper-parameters that no checkpoint can hold, before training instead of at the first checkpoint.

        Args:
            owners: The module and the datamodule, or None.

        Raises:
            CheckpointError: Names the entry, its type and the way out.
        """
        for owner in owners:
            to_plain(dict(getattr(owner, "hparams", None) or {}), "hyper_parameters")

    def remove(self, path: str | Path) -> None:
        """Removes a checkpoint, after those that are being written. Any number of ranks may call it."""
        if not is_remote(path):
            act: Callable[[], None] = partial(remove, Path(path).absolute())
        elif self._group.rank() == 0:
            act = partial(remove_remote, str(path))
        else:
            return
        if self._background is None:
            act()
        else:
            self._background.afterwards(act)
