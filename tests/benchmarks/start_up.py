"""What a start takes beyond imports: `python -m tests.benchmarks.start_up`.

One rank of a fake mesh of 32 ranks; 24-layer models that are built on the meta device, as in ``configure_model``. A
model of two layers starts before, so that imports are not counted, nor is the proof of the tensor axis, which is kept
from earlier runs. Prints a Markdown table of CPU seconds, which other processes disturb less, and of wall seconds in
all; asserts nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.initial.record import InitRecorder
from lightning_3d.mesh.device import build_device_mesh
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.plan import apply_plan, make_plan
from tests.parity.models import NextToken
from tests.spmd.pool import run_spmd

RANKS, LAYERS, WIDTH, SAMPLES, LENGTH = 32, 24, 1024, 4, 128
TARGET = 2.0


def llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=WIDTH,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    return LlamaForCausalLM(config)


def gpt2(layers: int) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    # A vocabulary that the tensor ranks divide.
    return GPT2LMHeadModel(GPT2Config(vocab_size=50304, n_embd=WIDTH, n_layer=layers, n_head=16))


@dataclass(frozen=True)
class Start:
    """One start."""

    name: str
    model: Callable[[int], nn.Module]
    mesh: MeshSpec
    options: dict[str, Any] = field(default_factory=dict)


STARTS = (
    Start("Llama, 1f1b, zero 1", llama, MeshSpec(data=2, pipeline=4, tensor=4)),
    Start("GPT-2 medium (tied), 1f1b, zero 1", gpt2, MeshSpec(data=2, pipeline=4, tensor=4)),
    Start(
        "GPT-2 medium (tied), zbvzerobubble, zero 3",
        gpt2,
        MeshSpec(data=8, pipeline=2, tensor=2),
        {"pipeline_schedule": "zbvzerobubble", "zero_stage": 3},
    ),
)


def begun(start: Start, layers: int) -> tuple[list[float], float]:
    """Starts a model and returns CPU seconds of building, planning and applying, and wall seconds in all."""
    clock, wall = [time.process_time()], time.perf_counter()
    spec = start.mesh
    mesh = build_device_mesh(spec, "cpu")
    recorder = InitRecorder(0)
    with recorder:
        module = NextToken(start.model(layers))
    tape = recorder.tape(module)
    clock.append(time.process_time())
    sizes = {f"{axis}_parallel_size": spec.size(axis) for axis in ("data", "pipeline", "tensor")}
    batch = (torch.zeros(SAMPLES, LENGTH, dtype=torch.int64),)
    plan = make_plan(
        module, spec, StrategyConfig(**sizes, **start.options), step=lambda: module.training_step(batch, 0)
    )
    clock.append(time.process_time())
    world = dist.group.WORLD
    assert world is not None
    apply_plan(module, plan, mesh, world=world, device=torch.device("cpu"), tape=tape)
    clock.append(time.process_time())
    return [after - before for before, after in pairwise(clock)], time.perf_counter() - wall


def measure(rank: int, world: int, name: str) -> tuple[list[float], float]:
    """Starts a small and a large model, on a rank in the middle."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANKS // 2, world_size=RANKS)
    start = next(each for each in STARTS if each.name == name)
    try:
        begun(start, 2 * start.mesh.pipeline)
        return begun(start, LAYERS)
    finally:
        dist.destroy_process_group()


def main() -> int:
    """Prints the table."""
    print(f"| {LAYERS} layers, {RANKS} ranks | build | plan | apply | CPU s | wall s | target | met |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for start in STARTS:
        ((parts, wall),) = run_spmd(measure, 1, start.name, process_group=False, timeout=600)
        cpu = sum(parts)
        cells = [f"{start.name}, {start.mesh}", *(f"{part:.2f}" for part in (*parts, cpu, wall)), f"{TARGET:.1f}"]
        print(f"| {' | '.join(cells)} | {'yes' if cpu <= TARGET else 'no'} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
