import os
import sys
import time
from collections.abc import Callable, Iterator

import lightning as L
import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_3d import Mesh3DStrategy
from lightning_3d.errors import ConfigError
from lightning_3d.strategy.launch import launcher as launching
from lightning_3d.strategy.launch.launcher import Mesh3DLauncher, end_earlier_job, single_job

_SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
_SLURM = {
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NNODES": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


@pytest.fixture
def hydra_is_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Lets Hydra be at a job of a sweep; other ranks do nothing but wait."""
    for name in launching._LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(launching, "rank_command", lambda: (_SLEEP, None))
    monkeypatch.setattr(launching, "_SECONDS_TO_DIE", 0.1)
    yield lambda job: monkeypatch.setattr(launching, "hydra_job", lambda: (job,))
    launching._job_here().end(failed=True)


def _launcher() -> Mesh3DLauncher:
    return Mesh3DLauncher(LightningEnvironment(), num_processes=2, num_nodes=1)


def _fail() -> None:
    raise RuntimeError("a rank failed")


def test_a_job_leaves_the_environment_as_it_found_it(
    monkeypatch: pytest.MonkeyPatch, hydra_is_at: Callable[[str], None]
) -> None:
    hydra_is_at("0")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("PL_GLOBAL_SEED", "2")
    started = time.monotonic()
    launcher = _launcher()

    def job() -> None:
        with single_job():
            os.environ["PL_GLOBAL_SEED"] = "3"
            launcher.launch(_fail)

    with pytest.raises(RuntimeError, match="a rank failed"):
        job()
    assert "LOCAL_RANK" not in os.environ
    assert (os.environ["MASTER_PORT"], os.environ["PL_GLOBAL_SEED"]) == ("1", "2")
    assert launcher.procs[0].returncode is not None
    assert time.monotonic() - started < 30


def test_the_next_job_of_a_sweep_launches_its_own_ranks(hydra_is_at: Callable[[str], None]) -> None:
    hydra_is_at("0")
    first, second = _launcher(), _launcher()
    with pytest.raises(RuntimeError, match="a rank failed"):
        first.launch(_fail)
    end_earlier_job()
    assert first.procs[0].poll() is None
    assert os.environ["LOCAL_RANK"] == "0"

    hydra_is_at("1")
    end_earlier_job()
    assert first.procs[0].returncode == -9
    assert "LOCAL_RANK" not in os.environ
    assert second.launch(lambda: 7) == 7
    assert len(second.procs) == 1


def test_a_rank_that_dies_ends_this_process_while_its_job_runs(
    hydra_is_at: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []
    hydra_is_at("0")
    launcher = _launcher()
    # Without an observer of its own, which would end the tests.
    launcher._call_children_scripts()
    observer = launching._Observer(launcher)
    assert not observer._run()
    with monkeypatch.context() as patch:
        launcher.procs[0].kill()
        launcher.procs[0].wait()
        patch.setattr("os.kill", lambda pid, signal: killed.append(pid))
        assert observer._run()
        assert killed == [os.getpid()]
        # A sweep goes on after a job that has ended, and what has failed here tells it.
        hydra_is_at("1")
        assert observer._run()
        hydra_is_at("0")
        launcher.failed = True
        assert observer._run()
    assert len(killed) == 1


@pytest.mark.parametrize(
    ("devices", "others", "told"),
    [
        (2, {}, "SLURM started 4 processes, but the Trainer asks for devices=2 x num_nodes=1"),
        (4, {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2"}, "devices=4 x num_nodes=1: You set `devices=4`"),
    ],
)
def test_a_trainer_that_disagrees_with_slurm_is_told_both_numbers(
    devices: int, others: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (_SLURM | others).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as caught:
        L.Trainer(accelerator="cpu", devices=devices, strategy=Mesh3DStrategy(), logger=False)
    assert told in str(caught.value)
    assert f"--nodes=1 --ntasks-per-node={devices}" in str(caught.value.fix)


def test_a_trainer_that_agrees_with_slurm_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in _SLURM.items():
        monkeypatch.setenv(name, value)
    trainer = L.Trainer(accelerator="cpu", devices=4, strategy=Mesh3DStrategy(), logger=False)
    assert trainer.strategy.launcher is None
