"""What a step really does, seen by dispatch modes: collectives by axis, live bytes by category."""

from lightning_3d.counters.categories import Category, Owners, storage_key
from lightning_3d.counters.collectives import CollectiveCounter, CollectiveRow, CollectiveTable
from lightning_3d.counters.live import LiveBytes, Peak, PeakReport, measure_peak

__all__ = [
    "Category",
    "CollectiveCounter",
    "CollectiveRow",
    "CollectiveTable",
    "LiveBytes",
    "Owners",
    "Peak",
    "PeakReport",
    "measure_peak",
    "storage_key",
]
