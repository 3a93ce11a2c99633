"""The planner's one question: what would this model need, and how fast would it be, on this mesh?"""

from __future__ import annotations

from lightning_3d.planner.case import Case
from lightning_3d.planner.cluster import Cluster, load_cluster
from lightning_3d.planner.constants import FITTED, Constants
from lightning_3d.planner.decoder import decoder_model
from lightning_3d.planner.model import ModelGraph
from lightning_3d.planner.prediction import Prediction
from lightning_3d.planner.pricing import Pricer
from lightning_3d.planner.shapes import BatchShape, DecoderShape, MeshShape
from lightning_3d.planner.software import THIS_LIBRARY, Software


def predict(
    model: ModelGraph | DecoderShape,
    mesh: MeshShape,
    batch: BatchShape,
    cluster: Cluster | str,
    *,
    bytes_recipe: str = "bf16_master",
    pipeline_schedule: str = "1f1b",
    activation_checkpointing: str = "none",
    software: Software = THIS_LIBRARY,
    constants: Constants = FITTED,
) -> Prediction:
    """Predicts memory and time of a training step; an estimate, not a measurement.

    Args:
        model: The shape of a decoder, or a `ModelGraph` of any module.
        mesh: The mesh; its ranks may be more than the cluster's devices, whose number does not matter here.
        batch: Samples of an optimizer step and of a micro-batch.
        cluster: A cluster, or the name of a file in conf/cluster.
        bytes_recipe: Name of a recipe of bytes per parameter, one of ``BYTE_RECIPES``.
        pipeline_schedule: Name of a schedule, as in ``Mesh3DStrategy``; "1f1b" with several stages on a rank is the
            interleaved one.
        activation_checkpointing: "none", "selective" or "full".
        software: What runs; this library unless something else is to be predicted.
        constants: What the formulas leave open.

    Returns:
        Bytes, seconds and operations, in plain floats.

    Raises:
        Lightning3DError: A name is unknown, or model, mesh and batch do not fit each other.
    """
    graph = decoder_model(model, software) if isinstance(model, DecoderShape) else model
    devices = load_cluster(cluster) if isinstance(cluster, str) else cluster
    pricer = Pricer(graph, devices, bytes_recipe, software=software, constants=constants)
    return pricer.predict(Case.checked(mesh, batch, pipeline_schedule, activation_checkpointing))
