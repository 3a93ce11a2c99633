"""What users may rely on by name. A change here is a change of the promise: tell it in the changelog."""

import inspect
import subprocess
import sys

import pytest
from lightning.pytorch.strategies import StrategyRegistry

import lightning_3d

_NAMES = frozenset(
    {
        "BatchError",
        "CheckpointError",
        "ConfigError",
        "Lightning3DError",
        "Mesh3DPrecision",
        "Mesh3DStrategy",
        "MeshError",
        "ModuleError",
        "PlanError",
        "__version__",
        "verify",
    }
)
_REGISTERED = ("mesh_3d", "mesh_3d_zero0", "mesh_3d_zero1", "mesh_3d_zero2", "mesh_3d_zero3")
_ARGUMENTS = (
    ("data_parallel_size", "auto"),
    ("pipeline_parallel_size", 1),
    ("tensor_parallel_size", 1),
    ("data_replicate_size", 1),
    ("zero_stage", 1),
    ("unit_blocks", 1),
    ("cpu_offload", False),
    ("micro_batch_size", None),
    ("num_microbatches", "auto"),
    ("pipeline_schedule", "1f1b"),
    ("stages_per_rank", "auto"),
    ("layers_per_stage", None),
    ("pipeline_stack", None),
    ("sequence_parallel", False),
    ("tensor_plan", None),
    ("pad_vocabulary", False),
    ("replay", True),
    ("layout_free_random", True),
    ("tensor_random", "derived"),
    ("activation_checkpointing", "none"),
    ("compile", False),
    ("uneven", "stop"),
    ("on_nonfinite", "none"),
    ("pretrained", None),
    ("pretrained_strict", True),
    ("rank_order", "data,pipeline,tensor"),
    ("save_distributed_checkpoint", True),
    ("async_save", False),
    ("check_replicas", False),
    ("explain", False),
    ("start_method", "auto"),
    ("process_group_backend", None),
    ("timeout_seconds", 300),
)


def test_public_names() -> None:
    assert set(lightning_3d.__all__) == _NAMES


@pytest.mark.parametrize("name", sorted(_NAMES))
def test_public_name_is_there(name: str) -> None:
    assert getattr(lightning_3d, name) is not None


def test_verify_is_a_package_and_is_called_as_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(lightning_3d.verify.verify)
    monkeypatch.setattr("lightning_3d.verify.verifier.verify", lambda *args, **options: (args, options))
    assert lightning_3d.verify("make", "data", layers=2) == (("make", "data"), {"layers": 2})
    assert set(lightning_3d.verify.__all__) == {"Certificate", "run", "verify"}
    with pytest.raises(AttributeError, match=r"module 'lightning_3d.verify' has no attribute 'certify'"):
        lightning_3d.verify.certify  # noqa: B018


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="module 'lightning_3d' has no attribute 'Mesh3D'"):
        lightning_3d.Mesh3D  # noqa: B018


@pytest.mark.parametrize("name", _REGISTERED)
def test_strategy_is_registered(name: str) -> None:
    assert isinstance(StrategyRegistry.get(name), lightning_3d.Mesh3DStrategy)


def test_arguments_of_the_strategy() -> None:
    parameters = inspect.signature(lightning_3d.Mesh3DStrategy).parameters.values()
    assert {parameter.name: parameter.default for parameter in parameters} == dict(_ARGUMENTS)
    assert {parameter.kind for parameter in parameters} == {inspect.Parameter.KEYWORD_ONLY}


def test_verify_waits_for_its_first_use() -> None:
    code = (
        "import sys, lightning_3d; print('lightning_3d.verify' in sys.modules); import lightning_3d.verify; "
        "print('lightning_3d.verify.verifier' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("program", "registered"),
    [
        pytest.param("train.py", True, marks=pytest.mark.slow),
        pytest.param("-m", True, marks=pytest.mark.slow),
        ("lightning-3d", False),
        ("/usr/bin/lightning-3d", False),
    ],
)
# "-m" alone is how a module of another package begins; our own is tried in the tests of the command line.
def test_import_registers_unless_the_process_is_our_command_line(program: str, registered: bool) -> None:
    code = f"import sys; sys.argv = [{program!r}]; import lightning_3d; print('lightning_3d.strategy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout.strip() == str(registered)
