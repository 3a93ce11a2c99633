"""The planner: memory and time of a model on a mesh, predicted; which mesh to take, and why.

Every figure is an estimate, not a measurement.
"""

from lightning_3d.planner.cluster import Cluster, Level, cluster_text, load_cluster, measured_cluster
from lightning_3d.planner.model import BlockModel, Bytes, Matrix, ModelGraph, Part
from lightning_3d.planner.predict import predict
from lightning_3d.planner.prediction import MemoryParts, Prediction, TimeParts
from lightning_3d.planner.recipes import BYTE_RECIPES, ByteRecipe
from lightning_3d.planner.shapes import BatchShape, DecoderShape, MeshShape
from lightning_3d.planner.software import MEGATRON, THIS_LIBRARY, Software

__all__ = [
    "BYTE_RECIPES",
    "MEGATRON",
    "THIS_LIBRARY",
    "BatchShape",
    "BlockModel",
    "ByteRecipe",
    "Bytes",
    "Cluster",
    "DecoderShape",
    "Level",
    "Matrix",
    "MemoryParts",
    "MeshShape",
    "ModelGraph",
    "Part",
    "Prediction",
    "Software",
    "TimeParts",
    "cluster_text",
    "load_cluster",
    "measured_cluster",
    "predict",
]
