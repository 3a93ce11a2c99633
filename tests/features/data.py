"""Features of data: what loops take of it, loaders and samplers, batches, and where they come from."""

from __future__ import annotations

from tests.features import batches, loaders, loops, samplers, sources
from tests.features.table import Feature

FEATURES: tuple[Feature, ...] = (
    *loops.FEATURES,
    *samplers.FEATURES,
    *loaders.FEATURES,
    *batches.FEATURES,
    *sources.FEATURES,
)
