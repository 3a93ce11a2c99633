"""A mesh looked at: what it stores, how often, and what its axes cost; and which of an article's figures hold.

The article has 175 billion parameters on 512 A100: 8 tensor ranks, 4 pipeline ranks, 16 data ranks; its figures are the
claims below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lightning_3d.planner.case import Case
from lightning_3d.planner.model import total_parameters
from lightning_3d.planner.prediction import Prediction
from lightning_3d.planner.pricing import Pricer
from lightning_3d.planner.recipes import BYTE_RECIPES
from lightning_3d.units import format_bytes, format_gb

_ARTICLE_MESH = (16, 4, 8)
_ARTICLE_BLOCK = 1.8e9
# Of a step, in percent.
_SAID: Mapping[str, float] = MappingProxyType({"bubble": 12, "data": 10, "tensor": 8})
_SAID_TFLOPS = 560.0
_POINTS = 2.5


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that is said, and what is found.

    Attributes:
        said: What is said.
        found: What is found.
        holds: Whether it holds.
    """

    said: str
    found: str
    holds: bool

    def __str__(self) -> str:
        return f"{'holds' if self.holds else 'does not hold'}: {self.said} - {self.found}"


@dataclass(frozen=True, slots=True)
class Look:
    """A mesh looked at.

    Attributes:
        given: Its prediction.
        facts: What it stores and sends, a line each.
        claims: Figures of the article, if it is the article's mesh.
    """

    given: Prediction
    facts: tuple[str, ...]
    claims: tuple[Claim, ...]

    def __str__(self) -> str:
        lines = [str(self.given), *(f"    {fact}" for fact in self.facts)]
        return "\n".join([*lines, *(f"    {claim}" for claim in self.claims)])


def look_at(pricer: Pricer, case: Case) -> Look:
    """Returns what a mesh stores, how often, and what its axes cost.

    Args:
        pricer: The model on its cluster.
        case: The mesh.
    """
    given = pricer.predict(case)
    mesh, shared = case.mesh, pricer.shared
    paper = BYTE_RECIPES["zero_paper"]
    whole = total_parameters(shared.model)
    even = whole / mesh.pipeline_parallel_size / mesh.tensor_parallel_size
    states = [paper.states(even, zero_stage=stage, shards=mesh.shards).total for stage in range(4)]
    bare = _without_zero(pricer, case)
    copies = [mesh.devices * size / (paper.per_parameter * whole) for size in states]
    boundary = shared.state(case) * case.batch.micro_size
    facts = [
        "states of 16 B per parameter: "
        + ", ".join(f"ZeRO {stage} {format_gb(size)}" for stage, size in enumerate(states)),
        f"without ZeRO, micro-batches of 1, all blocks recomputed: {format_gb(bare[0])} of states and activations, "
        f"{format_gb(bare[1])} with receive buffers, a device has {given.capacity / 1e9:.0f} GB",
        "each byte of the states is stored "
        + ", ".join(f"{n:.1f} times (ZeRO {stage})" for stage, n in enumerate(copies)),
    ]
    if mesh.pipeline_parallel_size > 1:
        ranks, count, stages = mesh.pipeline_parallel_size, case.microbatches, case.stages_per_rank
        text = f"{ranks - 1}/{count * stages + ranks - 1}"
        facts.append(
            f"bubble {text} = {(ranks - 1) / (count * stages + ranks - 1):.1%} of the time with equal stages and whole "
            f"backwards; {format_bytes(boundary)} cross a stage boundary in a micro-batch, each way"
        )
    return Look(given, tuple(facts), tuple(_claims(pricer, case, given, states, bare)))


def _without_zero(pricer: Pricer, case: Case) -> tuple[float, float]:
    """Bytes without ZeRO and with the fewest activations: states with activations, and everything."""
    plain = Pricer(pricer.shared.model, pricer.shared.cluster, "zero_paper", software=pricer.shared.software)
    mesh = replace(case.mesh, zero_stage=0, data_replicate_size=1, stages_per_rank=1)
    batch = replace(case.batch, micro_size=1)
    memory = plain.predict(Case.checked(mesh, batch, "1f1b", "full")).memory
    return memory.states + memory.activations, memory.total


def _claims(
    pricer: Pricer, case: Case, given: Prediction, states: list[float], bare: tuple[float, float]
) -> list[Claim]:
    mesh = case.mesh
    block = max(part.parameters for part in pricer.shared.kinds)
    degrees = mesh.data_parallel_size, mesh.pipeline_parallel_size, mesh.tensor_parallel_size
    if degrees != _ARTICLE_MESH or abs(block / _ARTICLE_BLOCK - 1) > 0.05:
        return []
    step = given.step_seconds
    found = {
        "bubble": given.time.bubble / step * 100,
        "data": given.time.data / step * 100,
        "tensor": given.time.tensor / step * 100,
    }
    return [
        Claim(
            "tensor 8 x pipeline 4 x data 16 without ZeRO fits A100 of 80 GB",
            f"{format_gb(states[0])} of states alone, {bare[0] / 1e9:.0f} GB with activations",
            bare[1] <= given.capacity,
        ),
        *(
            Claim(f"{name} {said:.0f} % of a step", f"{found[name]:.1f} %", abs(found[name] - said) <= _POINTS)
            for name, said in _SAID.items()
        ),
        Claim(
            f"{_SAID_TFLOPS:.0f} TFLOP/s are 70 % efficiency on 512 devices",
            f"{_SAID_TFLOPS / (given.peak_flops / 1e12):.2%} of their peak; expected "
            f"{given.tflops_per_device * mesh.devices / 1e3:.1f} PFLOP/s, MFU {given.mfu:.0%}",
            False,
        ),
        Claim(
            "an attention layer of 1.4 GB does not fit one device, so tensor ranks are needed",
            f"a whole block has {format_gb(block * 2)} of weights and {block * 16 / 1e9:.0f} GB of states",
            block * 16 > given.capacity,
        ),
    ]
