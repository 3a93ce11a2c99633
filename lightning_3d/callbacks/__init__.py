"""Lightning callbacks that know about meshes; all of them run with any strategy, and do what they can."""

from lightning_3d.callbacks.checkpoint import EndCheckpoint
from lightning_3d.callbacks.communication import Communication, CommunicationReport
from lightning_3d.callbacks.memory import MemoryMonitor
from lightning_3d.callbacks.throughput import Throughput
from lightning_3d.callbacks.timeline import PipelineTimeline

__all__ = [
    "Communication",
    "CommunicationReport",
    "EndCheckpoint",
    "MemoryMonitor",
    "PipelineTimeline",
    "Throughput",
]
