"""Verifying modules in processes of their own: what is equal is certified, what is broken is found and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_3d.errors import ConfigError, ModuleError, RunError
from lightning_3d.mesh.spec import AXIS_KEYS
from lightning_3d.verify import Certificate, verify
from lightning_3d.verify.processes import Crew
from lightning_3d.verify.runs import Request, Runs
from lightning_3d.verify.subject import GivenSubject
from tests.marks import more
from tests.spmd import verified
from tests.spmd.programs import run_python

pytestmark = [pytest.mark.spmd, pytest.mark.slow, pytest.mark.timeout(240)]

_DATA = {"data_parallel_size": 2}
_SECONDS = 120.0


def of(module: Any, strategy: dict[str, Any], **options: Any) -> Certificate:
    return verify(module, verified.tokens, strategy, timeout_seconds=options.pop("seconds", _SECONDS), **options)


def errors(found: Certificate) -> dict[str, float]:
    return {check.kind: check.worst.error for check in found.checks if check.worst is not None}


def facts(found: Certificate) -> str:
    assert found.place is not None
    return "\n".join(found.place.facts)


@pytest.mark.parametrize(
    ("module", "strategy", "layers"),
    [
        (verified.LlamaModule, {"tensor_parallel_size": 2, "data_parallel_size": 1}, 2),
        more(verified.LlamaModule, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 3}, None),
        more(verified.stacked, {"pipeline_parallel_size": 2, "pipeline_schedule": "interleaved1f1b"}, None),
    ],
)
def test_a_module_is_certified(module: Any, strategy: dict[str, Any], layers: int | None) -> None:
    found = of(module, strategy, layers=layers)
    assert found.equal, str(found)
    assert found.place is None
    llama = module is verified.LlamaModule
    assert found.bounds.startswith("fp32, since 'model.model.rotary_emb'") if llama else found.bounds == "fp64"
    assert {"loss", "gradients", "parameters", "initial weights"} <= set(errors(found))
    assert ("self_attn'" if llama else "drop'") in found.random
    assert bool(found.setting.shrunk) == (layers is not None)


def test_a_module_that_is_not_deterministic_is_found_on_one_device() -> None:
    found = of(verified.noisy, _DATA)
    assert not found.equal
    assert found.checks == ()
    assert "'blocks.0.noise' (Noise) is the first module that gives something else" in facts(found)
    assert found.place is not None
    assert found.place.axes is None


@pytest.mark.parametrize(
    ("strategy", "axes"),
    [
        (_DATA, ("data",)),
        more({**_DATA, "pipeline_parallel_size": 2, "num_microbatches": 2}, ("data",)),
    ],
)
def test_a_block_with_hidden_state_is_found(strategy: dict[str, Any], axes: tuple[str, ...]) -> None:
    found = of(verified.counting, strategy)
    assert not found.equal
    assert found.place is not None
    assert found.place.axes == axes
    assert "'blocks.0' (CountingBlock) is the first module that gives something else" in facts(found)
    assert "'blocks.0' changes 'calls' while it computes" in facts(found)
    assert "27 of 27 gradients differ: on the way back from the loss 'head.bias' first" in facts(found)


def test_a_module_that_fails_on_a_mesh_alone_is_told_with_its_axis() -> None:
    found = of(verified.failing, _DATA, steps=1)
    assert not found.equal
    assert found.place is not None
    assert found.place.axes == ("data",)
    assert "RuntimeError: not on this rank" in facts(found)
    assert str(found).startswith("FAILED: Stacked runs on one device, but not on data 2 ")


@pytest.mark.thorough
def test_ranks_that_compute_something_else_are_found_on_the_tensor_axis() -> None:
    found = of(verified.of_rank, {"data_parallel_size": 1, "tensor_parallel_size": 2})
    assert found.place is not None
    assert found.place.axes == ("tensor",)
    assert "'blocks.0' (RankBlock) is the first module" in facts(found)
    assert any("tensor_plan={'blocks.0*': 'replicate'}: no help" in each for each in found.place.advice)


@pytest.mark.thorough
def test_a_step_that_narrows_gets_the_bounds_of_fp32() -> None:
    found = of(verified.narrow, _DATA, steps=1)
    assert found.equal, str(found)
    assert found.bounds == "fp32, since 'the step itself' computes in float32 inside"


@pytest.mark.thorough
def test_a_module_that_fails_in_fp64_is_verified_in_fp32() -> None:
    found = of(verified.only_fp32, _DATA, steps=1)
    assert found.equal, str(found)
    assert found.setting.precision == "32-true"
    assert "in fp64 the module fails on one device" in found.notes[0]


@pytest.mark.thorough
def test_reduced_precision_is_bounded_by_its_own_distance_from_fp32() -> None:
    found = of(verified.stacked, _DATA, precision="bf16-mixed")
    assert found.equal, str(found)
    assert found.bounds.startswith("three times the distance of bf16-mixed")


def test_a_rank_that_hangs_is_killed_and_shown(tmp_path: Path) -> None:
    # Long enough for the process that ranks are forked from to begin.
    pids = Crew(directory=tmp_path, seconds=_SECONDS).run(verified.hang, 2, None)
    with pytest.raises(RunError, match=r"(?s)1 of 2 ranks were still running after 3 s.*rank 1.*verified\.py.*in hang"):
        Crew(directory=tmp_path, seconds=3).run(verified.hang, 2, 1)
    with pytest.raises(RunError, match=r"(?s)rank 1 of 2 failed:.*died with exit code 7"):
        Crew(directory=tmp_path, seconds=_SECONDS).run(verified.leave, 2, 1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"strategy": {"data_parallel_size": 1}}, "nothing to compare"),
        ({"strategy": {"zero_stag": 1}}, "zero_stag does not exist"),
        ({"strategy": _DATA, "precision": "64"}, "precision='64' does not exist"),
        ({"strategy": _DATA, "steps": 0}, "steps=0 is too small"),
        ({"strategy": _DATA, "trainer": {"callbacks": []}}, "trainer options callbacks"),
    ],
)
def test_impossible_arguments_start_no_process(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        verify(verified.stacked, verified.tokens, **options)


@pytest.mark.thorough
def test_the_hash_of_a_plan_is_that_of_the_mesh() -> None:
    subject = GivenSubject.of(verified.stacked, verified.tokens, 0)
    options = {"data_parallel_size": 1, "tensor_parallel_size": 2}
    fixed: dict[str, Any] = {"layers": None, "world": 2, "steps": 1, "trainer": {}, "seed": 0, "seconds": _SECONDS}
    with Runs(Request(subject=subject, options=options, **fixed)) as runs:
        first, second = (runs.on(AXIS_KEYS, "64-true").record for _ in range(2))
        other = runs.on(AXIS_KEYS, "64-true", changes={"tensor_plan": {"blocks.0.*": "replicate"}}).record
    assert first.plan_hash == second.plan_hash != other.plan_hash


def test_objects_that_cannot_travel_are_refused() -> None:
    with pytest.raises(ModuleError, match="cannot be sent to the processes"):
        verify(lambda: verified.stacked(), verified.tokens, _DATA)


def test_the_command_verifies_the_demo(tmp_path: Path) -> None:
    small = ("layers=2", "steps=2", "data.length=32", "data.max_bytes=200000", "hydra.run.dir=run")
    mesh = ("strategy=pipeline", "trainer.devices=2")
    finished = run_python(tmp_path, "-m", "lightning_3d", "verify", "recipe=demo", *mesh, *small)
    assert finished.code == 0, finished.output
    assert "EQUAL in all that was compared: LanguageModel on data 1 x pipeline 2 x tensor 1" in finished.output
    assert "shrunk          model.blocks: the first 2 of 4 GPTBlock" in finished.output
    read = json.loads((tmp_path / "run/certificate.json").read_text())
    assert read["equal"] is True
    assert read["bounds"] == "fp64"
    assert read["random"].startswith("nothing draws")
    assert (tmp_path / "run/certificate.txt").read_text().startswith("EQUAL")
