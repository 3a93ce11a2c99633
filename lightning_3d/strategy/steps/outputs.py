"""Who looks at the outputs of steps."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.model_helpers import is_overridden

_PREDICT = "predict"


def are_seen(module: LightningModule, stage: str) -> bool:
    """Returns whether outputs of a step reach anybody: a hook of the user's, or the caller of ``trainer.predict``.

    Args:
        module: The user's module.
        stage: "train", "validation", "test" or "predict".
    """
    trainer = module.trainer
    hook = f"on_{stage}_batch_end"
    if is_overridden(hook, module):
        return True
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if any(_is_of_the_user(getattr(type(callback), hook)) for callback in callbacks):
        return True
    if stage != _PREDICT:
        return False
    writers = any(isinstance(callback, BasePredictionWriter) for callback in callbacks)
    return writers or bool(trainer.predict_loop.return_predictions)


def _is_of_the_user(hook: Any) -> bool:
    """Whether a hook of a callback is more than Lightning's own, which do not look at outputs."""
    return hook.__module__.split(".")[0] not in ("lightning", "lightning_3d")
