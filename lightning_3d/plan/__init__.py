"""The order of composition: from a module and a mesh to a Plan, and from the Plan to a module that trains on it."""

from lightning_3d.parallel.tensor.replay.block import ReplayOptions
from lightning_3d.plan.apply import apply_plan
from lightning_3d.plan.calls import unwatch_calls, watch_calls
from lightning_3d.plan.copies import ModuleCopies
from lightning_3d.plan.engine import MeshEngine
from lightning_3d.plan.make import Plan, make_plan

__all__ = [
    "MeshEngine",
    "ModuleCopies",
    "Plan",
    "ReplayOptions",
    "apply_plan",
    "make_plan",
    "unwatch_calls",
    "watch_calls",
]
