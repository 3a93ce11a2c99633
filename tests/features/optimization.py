"""Features of optimization: accumulation, clipping, optimizers, schedulers."""

from __future__ import annotations

from tests.features.here import CUBE, Here
from tests.features.modules import Data, Module, metrics, weights
from tests.features.table import Feature, Seen


def accumulation(here: Here) -> Seen:
    trainer = here.trainer(accumulate_grad_batches=3, max_epochs=2)
    trainer.fit(Module(), Data(here))
    return {"metrics": metrics(trainer), "weights": weights(trainer), "steps": trainer.global_step}


def clipping_by_norm(here: Here) -> Seen:
    trainer = here.trainer(gradient_clip_val=0.1)
    trainer.fit(Module(), Data(here))
    return {"metrics": metrics(trainer), "weights": weights(trainer)}


FEATURES: tuple[Feature, ...] = (
    Feature(name="accumulate_grad_batches", program=accumulation, always=(CUBE,)),
    Feature(name="gradient_clip_val by norm", program=clipping_by_norm, always=(CUBE,)),
)
