"""The words of a command line that make a training run of a prediction."""

from __future__ import annotations

from lightning_3d.planner.prediction import Prediction
from lightning_3d.planner.request import Request


def overrides(one: Prediction, request: Request) -> str:
    """Returns the overrides that make a training run of a prediction.

    Args:
        one: The prediction.
        request: What was asked.
    """
    mesh, nodes = one.mesh, -(-one.mesh.devices // request.cluster.devices_per_node)
    words = {
        "strategy": "default",
        "strategy.data_parallel_size": mesh.data_parallel_size,
        "strategy.data_replicate_size": mesh.data_replicate_size,
        "strategy.pipeline_parallel_size": mesh.pipeline_parallel_size,
        "strategy.tensor_parallel_size": mesh.tensor_parallel_size,
        "strategy.zero_stage": mesh.zero_stage,
        "strategy.pipeline_schedule": one.pipeline_schedule,
        "strategy.stages_per_rank": mesh.stages_per_rank,
        "strategy.sequence_parallel": str(mesh.sequence_parallel).lower(),
        "strategy.pad_vocabulary": str(undivided(request, mesh.tensor_parallel_size)).lower(),
        "strategy.activation_checkpointing": one.activation_checkpointing,
        "strategy.rank_order": f"'\"{mesh.rank_order}\"'",
        "batch.micro_size": one.batch.micro_size,
        "trainer.num_nodes": nodes,
        "trainer.devices": mesh.devices // nodes,
    }
    if request.accumulate > 1:
        # Data ranks share out a step's samples: of a part of them their degree need not be a divisor.
        words |= {"batch.global_size": one.batch.global_size, "trainer.accumulate_grad_batches": 1}
    usual: dict[str, object] = {"strategy.data_replicate_size": 1}
    usual |= dict.fromkeys(("strategy.sequence_parallel", "strategy.pad_vocabulary"), "false")
    if mesh.pipeline_parallel_size == 1:
        usual |= {name: words[name] for name in ("strategy.pipeline_schedule", "strategy.stages_per_rank")}
    if mesh.rank_order == "data,pipeline,tensor":
        usual["strategy.rank_order"] = words["strategy.rank_order"]
    return " ".join(f"{name}={value}" for name, value in words.items() if usual.get(name) != value)


def undivided(request: Request, tensor: int) -> bool:
    """Returns whether some tensor ranks do not divide the vocabulary, as far as it is known.

    Args:
        request: What was asked.
        tensor: Degree of the tensor axis.
    """
    return tensor > 1 and (request.shape is None or request.shape.vocab % tensor > 0)
