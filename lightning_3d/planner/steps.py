"""Five steps to a mesh, as a rule of thumb tells them, each with the number that decides it; and what the search says.

The rule: does the model fit one device? does one layer? tensor ranks inside a node; as much pipeline as the network
wants; data ranks fill the rest. It knows ZeRO at most in its first stage, so the search is held against it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_3d.planner.model import total_parameters
from lightning_3d.planner.prediction import Prediction
from lightning_3d.planner.pricing import Pricer
from lightning_3d.planner.search import Found, Space, search, tensor_degrees, why_slower
from lightning_3d.units import format_count, format_gb, format_seconds

# What the rule calls a fast network: 400 Gb/s for a node.
_FAST = 50e9
# Weights, gradients and Adam's two moments, all of them in 16 bit.
_RULE_BYTES = 8
# Further from the best the rule is said to lose.
_TIED = 0.03


@dataclass(frozen=True, slots=True)
class Step:
    """One step.

    Attributes:
        question: What it asks.
        number: The number that decides.
        decision: What follows.
    """

    question: str
    number: str
    decision: str


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read the rule, and where it leads.

    Attributes:
        name: How it reads the second step.
        mesh: The fastest mesh that it allows, with ZeRO 0 or 1; None: it ends nowhere.
        verdict: How it does against the best mesh.
    """

    name: str
    mesh: Prediction | None
    verdict: str


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule, applied.

    Attributes:
        steps: Its five steps.
        readings: Where they lead.
    """

    steps: tuple[Step, ...]
    readings: tuple[Reading, ...]

    def __str__(self) -> str:
        lines = []
        for number, step in enumerate(self.steps, 1):
            lines += [f"  {number}. {step.question}", f"     {step.number}", f"     -> {step.decision}"]
        for reading in self.readings:
            lines.append(f"  {reading.name}: {reading.mesh.mesh if reading.mesh else 'no mesh'}; {reading.verdict}")
        return "\n".join(lines)


def apply_rule(pricer: Pricer, devices: int, space: Space, found: Found) -> Rule:
    """Applies the rule and holds the search against it.

    Args:
        pricer: The model on its cluster.
        devices: Devices to use.
        space: What the search may vary.
        found: What the search found.
    """
    cluster, model = pricer.shared.cluster, pricer.shared.model
    alone = _alone(pricer, devices, space)
    largest = min(cluster.devices_per_node, space.largest_tensor or cluster.devices_per_node)
    tensor = max(degree for degree in tensor_degrees(model, largest) if devices % degree == 0)
    best = found.best[0] if found.best else None
    heads = ", ".join(map(str, dict.fromkeys(model.heads))) or "unknown"
    if alone is not None:
        readings = [_reading(pricer, devices, space, best, "data ranks alone", 1, (1,))]
    else:
        # Both are the same where one tensor rank is the most.
        names = {1: "without a tensor axis"}
        names.setdefault(tensor, f"tensor {tensor}, as the rule's own example reads it")
        readings = [_reading(pricer, devices, space, best, name, degree) for degree, name in names.items()]
    outside = f"; outside {cluster.levels[-1].bandwidth / 1e9:.3g} GB/s" if len(cluster.levels) > 1 else ""
    steps = (
        _first_step(pricer, alone),
        _second_step(pricer),
        Step(
            "At most as many tensor ranks as a node has devices",
            f"{cluster.devices_per_node} devices in a node, {cluster.levels[0].bandwidth / 1e9:.0f} GB/s{outside}; "
            f"heads {heads}",
            f"tensor up to {tensor}",
        ),
        _network_step(pricer, devices, space, best.mesh.tensor_parallel_size if best else tensor),
        _last_step(readings, space),
    )
    return Rule(steps, tuple(readings))


def _alone(pricer: Pricer, devices: int, space: Space) -> Prediction | None:
    one = replace(space, tensor=1, pipeline=1, zero_stages=(0,))
    found = search(pricer, devices, one, top=1)
    return found.best[0] if found.best else None


def _first_step(pricer: Pricer, alone: Prediction | None) -> Step:
    recipe, memory = pricer.shared.recipe, pricer.shared.cluster.memory
    parameters = total_parameters(pricer.shared.model)
    states = recipe.per_parameter * parameters
    number = (
        f"states {recipe.per_parameter:g} B x {format_count(parameters)} = {format_gb(states)}, "
        f"a device has {memory / 1e9:.0f} GB; with Adam in 16 bit and no master weights, as the rule counts, "
        f"{format_gb(_RULE_BYTES * parameters)}"
    )
    if alone is not None:
        return Step(
            "Does it fit one device?", number, f"yes ({format_gb(alone.needed_bytes)} needed): data ranks alone"
        )
    return Step("Does it fit one device?", number, "no (the rule does not ask what ZeRO 2 or 3 would divide)")


def _second_step(pricer: Pricer) -> Step:
    recipe, memory = pricer.shared.recipe, pricer.shared.cluster.memory
    part = max(pricer.shared.kinds, key=lambda one: one.parameters)
    weights, states = part.parameters * recipe.weights, part.parameters * recipe.per_parameter
    working = part.keeps("none").on_rank(1, False) * recipe.computed / 2
    number = (
        f"largest block {format_count(part.parameters)}: weights {format_gb(weights, 2)}, states {format_gb(states)}, "
        f"activations of one sample {format_gb(working, 2)}; a device has {memory / 1e9:.0f} GB"
    )
    if states + working > memory:
        return Step("Does one layer fit one device?", number, "no: tensor ranks")
    return Step("Does one layer fit one device?", number, "yes: by the letter a pipeline is enough")


def _network_step(pricer: Pricer, devices: int, space: Space, tensor: int) -> Step:
    """What both axes send through the network, at the least pipeline degree above 1."""
    cluster, question = pricer.shared.cluster, "How fast is the network?"
    if devices <= cluster.devices_per_node:
        return Step(question, "one node", "no network: the axes may lie as they like")
    outer = cluster.levels[-1].bandwidth * cluster.devices_per_node
    said = "fast: the rule says more pipeline" if outer >= _FAST else "slow: the rule says less pipeline, more data"
    text = f"{outer * 8e-9:.0f} Gb/s for a node, {cluster.levels[-1].bandwidth / 1e9:.3g} GB/s for each of its devices"
    anyway = replace(space, tensor=tensor, schedules=("1f1b",), zero_stages=(1,))
    tried = [search(pricer, devices, replace(anyway, pipeline=degree), top=1) for degree in (2, 4, 8, 16)]
    meshes = [one.best[0] for one in tried if one.best]
    if not meshes:
        return Step(question, text, said)
    few, many = meshes[0], meshes[-1]
    sums = (
        f"; at tensor {tensor}, pipeline {few.mesh.pipeline_parallel_size} a step sends for {_sends(few)}, "
        f"at {many.mesh.pipeline_parallel_size} for {_sends(many)}"
    )
    better = "more" if many.step_seconds < few.step_seconds else "less"
    if f"{better} pipeline" not in said:
        said += ", which is reversed here"
    return Step(question, text + sums, f"{said}; the time of the step wants {better} pipeline")


def _sends(one: Prediction) -> str:
    data = one.time.data + one.hidden_data_seconds
    return f"pipeline {format_seconds(one.time.pipeline)}, data {format_seconds(data)}"


def _last_step(readings: list[Reading], space: Space) -> Step:
    mesh = next((one.mesh for one in readings if one.mesh is not None), None)
    if mesh is None:
        return Step(
            "Data ranks fill the rest", "no pipeline degree makes it fit with ZeRO 0 or 1", "the rule ends here"
        )
    data = mesh.mesh.data_parallel_size
    number = (
        f"{mesh.mesh.devices} / (pipeline {mesh.mesh.pipeline_parallel_size} x tensor "
        f"{mesh.mesh.tensor_parallel_size}) = {data}; {space.global_size} samples / {data} = "
        f"{mesh.microbatches} micro-batches of {mesh.batch.micro_size}, bubble {mesh.bubble_fraction:.1%}"
    )
    return Step("Data ranks fill the rest", number, str(mesh.mesh))


def _reading(
    pricer: Pricer,
    devices: int,
    space: Space,
    best: Prediction | None,
    name: str,
    tensor: int,
    pipelines: tuple[int, ...] | None = None,
) -> Reading:
    """The first pipeline degree that fits, with micro-batch and checkpointing at their best."""
    blocks = len(pricer.shared.model.blocks)
    degrees = pipelines or [degree for degree in range(1, blocks + 1) if devices // tensor % degree == 0]
    for degree in degrees:
        only = replace(space, tensor=tensor, pipeline=degree, zero_stages=(0, 1), schedules=("1f1b",))
        found = search(pricer, devices, only, top=1)
        if found.best:
            return Reading(name, found.best[0], _verdict(found.best[0], best))
    return Reading(name, None, "it ends nowhere: nothing fits with ZeRO 0 or 1")


def _verdict(mesh: Prediction, best: Prediction | None) -> str:
    if best is None or mesh.step_seconds <= best.step_seconds * (1 + _TIED):
        return f"{format_seconds(mesh.step_seconds)}, as good as the best"
    return f"{format_seconds(mesh.step_seconds)}, it loses: {why_slower(mesh, best)}"
