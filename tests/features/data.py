"""Features: data."""

from __future__ import annotations

from tests.features.table import Feature

FEATURES: tuple[Feature, ...] = ()
