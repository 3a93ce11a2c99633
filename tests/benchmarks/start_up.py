"""What a start takes: `python -m tests.benchmarks.start_up`.

Three tables of CPU seconds, which other processes disturb less than wall seconds. The first: what ``import
lightning_3d`` adds to Lightning's own import, each in processes of their own. The second: commands that end before
training, from the start of the interpreter. The third: one rank of a fake mesh of 32 ranks, with 24-layer models that
are built on the meta device, as in ``configure_model``. A model of two layers starts before, so that imports are not
counted; the proof of the tensor axis is made anew, which later runs find again, or it is skipped where it would take
more than a second. Asserts nothing.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.initial.record import InitRecorder
from lightning_3d.mesh.device import build_device_mesh
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.parallel.tensor.proof.cache import ProofCache
from lightning_3d.parallel.tensor.proof.prove import startup_proof
from lightning_3d.parallel.tensor.proof.ranks import StepCall
from lightning_3d.parallel.tensor.proof.result import Proof
from lightning_3d.plan import apply_plan, make_plan
from tests.parity.models import NextToken
from tests.spmd.pool import run_spmd

RANKS, LAYERS, WIDTH, SAMPLES, LENGTH = 32, 24, 1024, 4, 128
TARGET, PLAN_TARGET, IMPORT_TARGET, COMMAND_TARGET = 2.0, 3.0, 0.3, 1.5
REPEATS = 5
IMPORTS = ("import lightning_3d", "from lightning_3d import Mesh3DStrategy", "import lightning_3d.callbacks")
COMMANDS = (
    "--help",
    "train --help",
    "plan --help",
    "dryrun --help",
    "verify --help",
    "convert --help",
    "doctor --help",
    "train recipe=dem",
    "train recipe=demo strategy.zero_stag=3",
    "train recipe=demo strategy.zero_stage=7",
    "plan recipe=demo strategy.zero_stage=7",
    "dryrun recipe=demo strategy.zero_stage=7",
    "verify recipe=demo strategy.zero_stage=7",
    "convert missing . --to torch",
)
_ADDED = "import time, lightning; begin = time.process_time(); {}; print(time.process_time() - begin)"


def llama(layers: int, width: int = WIDTH, vocabulary: int = 32000) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
    )
    return LlamaForCausalLM(config)


def narrow(layers: int) -> nn.Module:
    return llama(layers, width=128, vocabulary=512)


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
    Start("Llama of width 128, 1f1b, zero 1", narrow, MeshSpec(data=2, pipeline=4, tensor=4)),
    Start("Llama, 1f1b, zero 1", llama, MeshSpec(data=2, pipeline=4, tensor=4)),
    Start("GPT-2 medium (tied), 1f1b, zero 1", gpt2, MeshSpec(data=2, pipeline=4, tensor=4)),
    Start(
        "GPT-2 medium (tied), zbvzerobubble, zero 3",
        gpt2,
        MeshSpec(data=8, pipeline=2, tensor=2),
        {"pipeline_schedule": "zbvzerobubble", "zero_stage": 3},
    ),
)


def begun(start: Start, layers: int) -> tuple[list[float], float, bool]:
    """Starts a model and returns CPU seconds of building, planning, proving and applying, wall seconds, if proved."""
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
    call = StepCall(method="training_step", args=(batch, 0))
    assert plan.tensor is not None
    with tempfile.TemporaryDirectory() as empty:
        proof = startup_proof(module, call, plan.tensor, values=tape.value, cache=ProofCache(Path(empty)))
    clock.append(time.process_time())
    world = dist.group.WORLD
    assert world is not None
    apply_plan(module, plan, mesh, world=world, device=torch.device("cpu"), tape=tape)
    clock.append(time.process_time())
    return [after - before for before, after in pairwise(clock)], time.perf_counter() - wall, isinstance(proof, Proof)


def measure(rank: int, world: int, name: str) -> tuple[list[float], float, bool]:
    """Starts a small and a large model, on a rank in the middle."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANKS // 2, world_size=RANKS)
    start = next(each for each in STARTS if each.name == name)
    try:
        begun(start, 2 * start.mesh.pipeline)
        return begun(start, LAYERS)
    finally:
        dist.destroy_process_group()


def added(statement: str) -> list[float]:
    """Returns CPU seconds of a statement in new processes that have imported Lightning."""
    command = [sys.executable, "-c", _ADDED.format(statement)]
    return [float(subprocess.run(command, capture_output=True, check=True).stdout) for _ in range(REPEATS)]


def spent(words: str) -> list[float]:
    """Returns CPU seconds of a command line, the interpreter's start included."""
    found = []
    for _ in range(REPEATS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "lightning_3d", *words.split()], capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return found


def show(title: str, rows: dict[str, list[float]], target: float) -> None:
    """Prints a table of repeated measurements."""
    print(f"| {title} | median CPU s | least | most | target | met |\n|---|---|---|---|---|---|")
    for name, seconds in rows.items():
        middle = statistics.median(seconds)
        numbers = f"{middle:.2f} | {min(seconds):.2f} | {max(seconds):.2f} | {target:.1f}"
        print(f"| `{name}` | {numbers} | {'yes' if middle < target else 'no'} |", flush=True)
    print()


def main() -> int:
    """Prints the tables."""
    show("added to `import lightning`", {statement: added(statement) for statement in IMPORTS}, IMPORT_TARGET)
    show("command, from the start", {f"lightning-3d {words}": spent(words) for words in COMMANDS}, COMMAND_TARGET)
    heads = (
        f"build | plan | proof | apply | plan + proof (< {PLAN_TARGET:.0f}) | others (< {TARGET:.0f}) | wall s | met"
    )
    print(f"| {LAYERS} layers, {RANKS} ranks, CPU s | {heads} |\n|---|---|---|---|---|---|---|---|---|", flush=True)
    for start in STARTS:
        ((parts, wall, proved),) = run_spmd(measure, 1, start.name, process_group=False, timeout=600)
        build, plan, proof, apply = parts
        numbers = (*parts, plan + proof, build + apply, wall)
        met = plan + proof < PLAN_TARGET and build + apply < TARGET
        cells = [f"{start.name}, {start.mesh}", *(f"{number:.2f}" for number in numbers), "yes" if met else "no"]
        cells[3] += "" if proved else " (skipped)"
        print(f"| {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
