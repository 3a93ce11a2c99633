import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.demos.boring_classes import BoringModel

from tests.marks import more
from tests.spmd.pool import MOST_RANKS, SpmdError, run_spmd, shared_pool

pytestmark = pytest.mark.spmd


def total(rank: int, world: int, factor: int, *, offset: int = 0) -> int:
    value = torch.tensor([rank * factor + offset])
    dist.all_reduce(value)
    assert dist.get_world_size() == world
    return int(value)


def test_results_by_rank_with_worlds_in_turn() -> None:
    assert run_spmd(total, 2, 10) == [10, 10]
    assert run_spmd(total, 4, 10, offset=1) == [64] * 4
    assert run_spmd(total, 2, 1) == [1, 1]
    assert run_spmd(total, 1, 1) == [0]


def tensors(rank: int, world: int) -> torch.Tensor:
    return torch.full((2,), float(rank))


def test_processes_are_kept_and_tensors_come_back() -> None:
    # Those that an earlier test has filled with threads end with the first call.
    run_spmd(tensors, 2)
    results = run_spmd(tensors, 2)
    before = shared_pool().processes()
    torch.testing.assert_close(results[1], torch.ones(2))
    run_spmd(tensors, 2)
    assert shared_pool().processes() == before


def leaves_threads(rank: int, world: int, number: int) -> None:
    for _ in range(number):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def test_a_process_full_of_threads_ends() -> None:
    run_spmd(leaves_threads, 2, 60)
    assert not {0, 1} & shared_pool().processes().keys()
    assert run_spmd(total, 2, 1) == [1, 1]
    assert {0, 1} <= shared_pool().processes().keys()


def raises_on_one(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("seven apples")
    dist.barrier()


def test_an_exception_frees_the_others_and_comes_first() -> None:
    start = time.monotonic()
    with pytest.raises(SpmdError, match="raises_on_one failed on 3 of 3 ranks") as caught:
        run_spmd(raises_on_one, 3)
    assert time.monotonic() - start < 15
    assert next(iter(caught.value.reports)) == 1
    assert "ValueError: seven apples" in caught.value.reports[1]
    assert "raise ValueError" in str(caught.value)
    assert run_spmd(total, 3, 1) == [3, 3, 3]


def hangs(rank: int, world: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank == 0:
        time.sleep(600)
    dist.barrier()


def test_a_hang_is_killed_and_says_where() -> None:
    run_spmd(total, 2, 1)
    before = shared_pool().processes()
    start = time.monotonic()
    with pytest.raises(SpmdError, match="still running after 2 s") as caught:
        run_spmd(hangs, 2, timeout=2)
    assert time.monotonic() - start < 10
    assert all("in hangs" in text for text in caught.value.reports.values())
    assert not any(Path(f"/proc/{before[rank]}").exists() for rank in (0, 1))
    assert run_spmd(total, 2, 1) == [1, 1]


def dies(rank: int, world: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def test_a_dead_rank_is_noticed_at_once() -> None:
    start = time.monotonic()
    with pytest.raises(SpmdError) as caught:
        run_spmd(dies, 2)
    assert time.monotonic() - start < 15
    assert list(caught.value.reports) == [1, 0]
    assert caught.value.reports[1] == "the process died with exit code -9"
    assert "after another rank had failed" in caught.value.reports[0]


def leaves_a_child(rank: int, world: int) -> None:
    child = subprocess.Popen(["sleep", "600"])
    raise RuntimeError(f"child={child.pid}=")


def test_children_of_a_failed_call_are_killed() -> None:
    with pytest.raises(SpmdError) as caught:
        run_spmd(leaves_a_child, 1)
    child = caught.value.reports[0].split("child=")[-1].split("=")[0]
    assert _ended(int(child))


def exits(rank: int, world: int) -> None:
    sys.exit(3)


def test_an_exit_is_a_failure() -> None:
    with pytest.raises(SpmdError, match="SystemExit: 3"):
        run_spmd(exits, 1)


def makes_a_mess(rank: int, world: int, directory: str) -> None:
    os.environ["LEFT_OVER"] = "1"
    os.chdir(directory)
    sys.path.append("/left/over")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(7)
    random.seed(7)
    warnings.simplefilter("ignore")


def state(rank: int, world: int) -> dict[str, Any]:
    return {
        "environment": os.environ.get("LEFT_OVER"),
        "directory": os.getcwd(),
        "path": "/left/over" in sys.path,
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "draws": (torch.rand(1).item(), random.random()),
        "threads": torch.get_num_threads(),
    }


def test_each_call_starts_clean(tmp_path: Path) -> None:
    clean = run_spmd(state, 1)
    run_spmd(makes_a_mess, 1, str(tmp_path))
    assert run_spmd(state, 1) == clean
    assert clean[0]["directory"] == os.getcwd()
    assert clean[0]["dtype"] == torch.float32
    assert clean[0]["threads"] == 1


def variable(rank: int, world: int) -> tuple[str | None, str]:
    return os.environ.get("MINE"), os.getcwd()


def test_the_callers_environment_and_directory_apply(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINE", "yes")
    monkeypatch.chdir(tmp_path)
    assert run_spmd(variable, 1) == [("yes", str(tmp_path))]


def warns(rank: int, world: int) -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def test_the_callers_warning_filters_apply() -> None:
    with pytest.raises(SpmdError, match="UserWarning: careful"):
        run_spmd(warns, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_spmd(warns, 1)


def own_group(rank: int, world: int) -> int:
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    return total(rank, world, 1)


def test_a_function_may_make_the_process_group_itself() -> None:
    assert run_spmd(own_group, 2, process_group=False) == [1, 1]


def fits(rank: int, world: int, directory: str) -> tuple[int, int, int]:
    trainer = L.Trainer(
        accelerator="cpu", devices=world, strategy="ddp", max_steps=2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=directory, num_sanity_val_steps=0,
        limit_val_batches=0,
    )  # fmt: skip
    trainer.fit(BoringModel())
    return trainer.global_rank, trainer.world_size, trainer.global_step


def test_a_trainer_works_inside(tmp_path: Path) -> None:
    assert run_spmd(fits, 2, str(tmp_path), process_group=False) == [(0, 2, 2), (1, 2, 2)]


def test_results_that_do_not_pickle() -> None:
    with pytest.raises(SpmdError, match="pickle"):
        run_spmd(a_function, 1)


def a_function(rank: int, world: int) -> Any:
    return lambda: None


def test_worlds_that_are_too_large() -> None:
    with pytest.raises(ValueError, match=f"1 to {MOST_RANKS}"):
        run_spmd(total, MOST_RANKS + 1, 1)


SESSION = """
import os, signal, sys, threading
sys.path.insert(0, {root!r})
from tests.spmd.pool import run_spmd, shared_pool
from tests.spmd import test_pool
if __name__ == "__main__":
    run_spmd(test_pool.total, 2, 1)
    print(*shared_pool().processes().values(), flush=True)
    {ending}
"""


@pytest.mark.parametrize(
    "ending",
    [
        more("os.kill(os.getpid(), signal.SIGKILL)"),
        "threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start(); run_spmd(test_pool.hangs, 2)",
    ],
    ids=["killed", "interrupted"],
)
def test_no_process_is_left_behind(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "session.py"
    script.write_text(SESSION.format(root=str(Path(__file__).parents[2]), ending=ending))
    done = subprocess.run([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=90)
    processes = [int(text) for text in done.stdout.split()]
    assert len(processes) == 2
    assert all(_ended(process) for process in processes)


def _ended(process: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            status = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if status == "Z":
            return True
        time.sleep(0.05)
    return False
