"""All features, in the groups in which the table shows them."""

from __future__ import annotations

from tests.features import averages, callbacks, checkpoints, data, launching, logging, optimization, precision
from tests.features.table import Feature

GROUPS: dict[str, tuple[Feature, ...]] = {
    "Precision": precision.FEATURES,
    "Optimization": optimization.FEATURES,
    "Averages of weights": averages.FEATURES,
    "Data": data.FEATURES,
    "Logging and metrics": logging.FEATURES,
    "Callbacks, loggers, profilers": callbacks.FEATURES,
    "Checkpoints, and one run after another": checkpoints.FEATURES,
    "Launching and configuration": launching.FEATURES,
}
FEATURES = tuple(feature for group in GROUPS.values() for feature in group)
