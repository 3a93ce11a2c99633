"""Programs that note every hook of module, data and callback, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.core.hooks import ModelHooks

from tests.features.here import Here
from tests.features.modules import Data, Module, weights
from tests.features.table import Seen

_BATCHES = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOADERS = tuple(f"{stage}_dataloader" for stage in ("train", "val", "test", "predict"))
_OF_DATA = ("prepare_data", "setup", "teardown", "state_dict", "load_state_dict", *_BATCHES, *_LOADERS)
_OF_MODULE = (
    *(name for name in vars(ModelHooks) if name.startswith("on_")),
    *("setup", "teardown", "configure_model", "configure_callbacks", "configure_optimizers"),
    *("configure_gradient_clipping", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step"),
    *("on_save_checkpoint", "on_load_checkpoint"),
)
_OF_CALLBACK = tuple(
    name for name in vars(Callback) if not name.startswith("_") and name not in ("state_key", "on_exception")
)


def _noting(base: type, owner: str, hooks: Iterable[str]) -> Any:
    """A class whose hooks note that they were called."""

    def noted(hook: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **options: Any) -> Any:
            self.notes.append(f"{owner}.{hook}")
            return getattr(base, hook)(self, *args, **options)

        return call

    return type(f"Noting{base.__name__}", (base,), {hook: noted(hook) for hook in hooks})


class Scheduled(Module):
    """With a scheduler that steps after each optimizer step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _parts(here: Here, notes: list[str]) -> tuple[Any, Any, Any]:
    module, data = _noting(Scheduled, "module", _OF_MODULE)(), _noting(Data, "data", _OF_DATA)(here, samples=40)
    callback = _noting(Callback, "callback", _OF_CALLBACK)()
    for part in (module, data, callback):
        part.notes = notes
    return module, data, callback


def _in_order(notes: list[str]) -> list[str]:
    """What every process calls; a mesh asks for its first loader before it makes its plan, other loaders later."""
    return [note for note in notes if note != "data.prepare_data" and not note.endswith("_dataloader")]


def order(here: Here) -> Seen:
    """Five batches in windows of four, so that the last window of each epoch is short."""
    notes: list[str] = []
    module, data, callback = _parts(here, notes)
    trainer = here.trainer(callback, max_epochs=2, accumulate_grad_batches=4, gradient_clip_val=0.5)
    seen: dict[str, Any] = {}
    for run in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        run(module, datamodule=data)
        loaders = sorted(note for note in notes if note.endswith("_dataloader"))
        prepared = notes.count("data.prepare_data") == int(here.rank == 0)
        seen[run.__name__] = {"order": _in_order(notes), "loaders": loaders, "prepared once": prepared}
        notes.clear()
    return {**seen, "steps": trainer.global_step, "weights": weights(trainer)}


def order_when_resumed(here: Here) -> Seen:
    notes: list[str] = []
    module, data, callback = _parts(here, notes)
    trainer = here.trainer(callback)
    trainer.fit(module, data)
    notes.clear()
    trainer.save_checkpoint(here.directory / "half.ckpt")
    saved = _in_order(notes)
    notes.clear()
    module, data, callback = _parts(here, notes)
    trainer = here.trainer(callback, max_epochs=2)
    trainer.fit(module, data, ckpt_path=str(here.directory / "half.ckpt"))
    return {"saved": saved, "resumed": _in_order(notes), "steps": trainer.global_step}
