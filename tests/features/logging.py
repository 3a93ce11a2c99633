"""Features of logging: what ``self.log`` and torchmetrics show, after every step and every epoch."""

from __future__ import annotations

from tests.features.here import CUBE
from tests.features.logged_metrics import by_hand, narrow, objects, windowed
from tests.features.logged_values import (
    attributes,
    callbacks,
    hooks,
    one_rank,
    prints,
    scalars,
    scalars_without_sync,
    several_loaders,
    sizes,
    sometimes,
)
from tests.features.table import Feature

# Metrics keep their states in fp32.
_SINGLE = 1e-6

FEATURES: tuple[Feature, ...] = (
    Feature(name="self.log: every reduce_fx, on_step and on_epoch", program=scalars, always=(CUBE,)),
    Feature(name="self.log without sync_dist", program=scalars_without_sync),
    Feature(name="self.log: batches of different sizes, batch_size=", program=sizes),
    Feature(name="self.log in every hook", program=hooks),
    Feature(name="self.log by callbacks", program=callbacks),
    Feature(name="self.log of names that some batches lack", program=sometimes),
    Feature(name="self.log from rank 0 alone", program=one_rank),
    Feature(name="self.log: metric_attribute, logger, prog_bar, enable_graph", program=attributes, close=_SINGLE),
    Feature(name="self.log with several loaders", program=several_loaders, close=_SINGLE),
    Feature(name="torchmetrics, logged as objects", program=objects, close=_SINGLE, always=(CUBE,)),
    Feature(name="torchmetrics, computed by hand", program=by_hand, close=_SINGLE),
    Feature(name="torchmetrics over a window of batches", program=windowed, close=_SINGLE),
    Feature(name="torchmetrics and self.log in bf16", program=narrow, close=1e-2),
    Feature(name="self.print", program=prints),
)
