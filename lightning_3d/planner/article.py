"""A mesh looked at: what it stores, how often, and what its axes cost; and which of an article's figures hold.

The article has 175 billion parameters on 512 A100: 8 tensor ranks, 4 pipeline ranks, 16 data ranks; its figures are the
claims below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from lightning_3d.planner.case import Case
from lightning_3d.planner.cluster import load_cluster
from lightning_3d.planner.model import total_parameters
from lightning_3d.planner.prediction import Prediction
from lightning_3d.planner.pricing import Pricer
from lightning_3d.planner.recipes import BYTE_RECIPES
from lightning_3d.planner.search import Space, search
from lightning_3d.units import format_bytes, format_gb

_ARTICLE_MESH = (16, 4, 8)
_ARTICLE_BLOCK = 1.8e9
_PARAMETERS = 175e9
_PAPER_BYTES = 16
_SLOW = "a100_x8_25gbe"
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
    bare = _without_zero(pricer, case, states[0])
    copies = [mesh.devices * size / (paper.per_parameter * whole) for size in states]
    boundary = shared.state(case) * case.batch.micro_size
    facts = [
        "states of 16 B per parameter, as the ZeRO paper counts: "
        + ", ".join(f"ZeRO {stage} {format_gb(size)}" for stage, size in enumerate(states)),
        f"without ZeRO, micro-batches of 1, all blocks recomputed: {format_gb(states[0])} of states and "
        f"{format_gb(bare.activations)} of activations on the first stage, "
        f"{format_gb(states[0] + bare.activations)} in all; with uneven ends and receive buffers "
        f"{format_gb(bare.everything)}; a device has {given.capacity / 1e9:.0f} GB",
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
    return Look(given, tuple(facts), tuple(_claims(pricer, case, given, bare)))


@dataclass(frozen=True, slots=True)
class _Bare:
    """Bytes without ZeRO and with the fewest activations: activations of the first stage, and all of the fullest."""

    states: float
    activations: float
    everything: float

    @property
    def text(self) -> str:
        return f"{format_gb(self.states)} of states, {(self.states + self.activations) / 1e9:.0f} GB with activations"


def _without_zero(pricer: Pricer, case: Case, states: float) -> _Bare:
    shared = pricer.shared
    mesh = replace(case.mesh, zero_stage=0, data_replicate_size=1)
    if mesh.stages_per_rank > 1:
        # What is told of each stage is told of all stages of a rank.
        mesh = replace(mesh, stages_per_rank=1, layers_per_stage=None)
    bare = Case.checked(mesh, replace(case.batch, micro_size=1), "1f1b", "full")
    found = []
    for software in (replace(shared.software, buffers_per_microbatch=False), shared.software):
        memory = Pricer(shared.model, shared.cluster, "zero_paper", software=software).predict(bare).memory
        found.append(memory)
    return _Bare(states, found[0].activations, found[1].total)


def _claims(pricer: Pricer, case: Case, given: Prediction, bare: _Bare) -> list[Claim]:
    mesh = case.mesh
    block = max(part.parameters for part in pricer.shared.kinds)
    degrees = mesh.data_parallel_size, mesh.pipeline_parallel_size, mesh.tensor_parallel_size
    if degrees != _ARTICLE_MESH or abs(block / _ARTICLE_BLOCK - 1) > 0.05:
        return []
    told = _PARAMETERS * _PAPER_BYTES / mesh.pipeline_parallel_size / mesh.tensor_parallel_size
    return [
        Claim(
            "tensor 8 x pipeline 4 x data 16 without ZeRO fits A100 of 80 GB",
            f"175e9 x 16 B / 32 = {told / 1e9:.1f} GB of states; as counted here {bare.text}",
            bare.everything <= given.capacity,
        ),
        _without_pipeline(given),
        *_shares(given),
        *_schedule(case, given),
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
        _slow_network(pricer, case),
    ]


def _without_pipeline(given: Prediction) -> Claim:
    tensor, devices = given.mesh.tensor_parallel_size, given.mesh.devices
    data = devices // tensor
    states = [
        BYTE_RECIPES["zero_paper"].states(_PARAMETERS / tensor, zero_stage=stage, shards=data).total
        for stage in (0, 1, 3)
    ]
    found = ", ".join(f"ZeRO {stage} {format_gb(size)}" for stage, size in zip((0, 1, 3), states, strict=True))
    return Claim(
        f"tensor {tensor} x data {data} without a pipeline, data ranks with whole copies", f"states of {found}", False
    )


def _shares(given: Prediction) -> list[Claim]:
    """What the parts of a step are said to cost, and cost."""
    step = given.step_seconds
    found = {"bubble": given.time.bubble, "data": given.time.data, "tensor": given.time.tensor}
    beside = {"data": f", and {given.hidden_data_seconds / step:.1%} beside computation"}
    return [
        Claim(
            f"{name} {said:.0f} % of a step",
            f"{found[name] / step * 100:.1f} %{beside.get(name, '')}",
            abs(found[name] / step * 100 - said) <= _POINTS,
        )
        for name, said in _SAID.items()
    ]


def _schedule(case: Case, given: Prediction) -> list[Claim]:
    """What 1F1B and recomputation are said to do."""
    ranks, count = case.mesh.pipeline_parallel_size, case.microbatches
    bubble = f"{ranks - 1}/{count + ranks - 1}"
    claims = [
        Claim(
            "1F1B has a smaller bubble than GPipe",
            f"both have {bubble}; {ranks} micro-batches are in flight in place of {count}; v stages on a rank make it "
            f"{ranks - 1}/({count} v + {ranks - 1})",
            False,
        ),
        Claim(
            "more micro-batches keep more activations",
            f"of GPipe; 1F1B holds at most {ranks} of {count}",
            False,
        ),
    ]
    again = given.time.recompute
    if again:
        claims.append(
            Claim(
                "recomputing everything costs 30 %",
                f"{again / given.time.compute:.0%} more computation, {again / (given.step_seconds - again):.0%} more "
                "time",
                abs(again / (given.step_seconds - again) - 0.3) <= _POINTS / 100 * 2,
            )
        )
    return claims


def _slow_network(pricer: Pricer, case: Case) -> Claim:
    """The rule for a slow network, priced with one Ethernet port of 25 Gb/s for a node."""
    cluster = load_cluster(_SLOW).with_nodes(-(-case.mesh.devices // load_cluster(_SLOW).devices_per_node))
    slow = Pricer(pricer.shared.model, cluster, pricer.shared.recipe_name, software=pricer.shared.software)
    tensor = case.mesh.tensor_parallel_size
    space = Space(global_size=case.batch.global_size, zero_stages=(1,), schedules=("1f1b",), tensor=tensor)
    tried = [search(slow, case.mesh.devices, replace(space, pipeline=degree), top=1).best for degree in (4, 8, 16, 32)]
    meshes = [best[0] for best in tried if best]
    found = ", ".join(
        f"pipeline {one.mesh.pipeline_parallel_size} {one.step_seconds:.0f} s (sends: data "
        f"{one.time.data + one.hidden_data_seconds:.0f} s, pipeline {one.time.pipeline:.0f} s)"
        for one in meshes
    )
    reversed_ = len(meshes) > 1 and meshes[0].step_seconds > min(one.step_seconds for one in meshes[1:])
    return Claim("on 25 GbE less pipeline and more data", f"a step with {found}", not reversed_)
