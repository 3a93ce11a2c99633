"""The command line in real processes: launched by itself, by torchrun, by a user's program, and in sweeps."""

import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.spmd.programs import Finished, records, run_python

pytestmark = [pytest.mark.spmd, pytest.mark.slow, pytest.mark.timeout(240)]

_TRAIN = ("-m", "lightning_3d", "train", "--config-dir", "conf")
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
_NODE = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's directory: text, a recipe, a callback of their own, programs."""
    directory = tmp_path / "a user's project"
    shutil.copytree(Path(__file__).parent / "project", directory, ignore=shutil.ignore_patterns("__pycache__"))
    (directory / "texts").mkdir()
    (directory / "texts" / "a.txt").write_text("to be or not to be, that is the question. " * 400)
    return directory


def _only(directory: Path) -> Path:
    (found,) = directory.iterdir()
    return found


def _files(directory: Path) -> set[str]:
    """Returns the files of a job but those of its checkpoints."""
    files = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
    return {str(path) for path in files if path.parts[0] != "checkpoints"}


_WRITTEN_ONCE = {
    *(f".hydra/{name}.yaml" for name in ("config", "hydra", "overrides")),
    *(f"csv/{name}" for name in ("hparams.yaml", "metrics.csv")),
    "tiny.log",
}


def test_two_processes_train_test_and_resume(project: Path) -> None:
    first = run_python(project, *_TRAIN, "recipe=tiny", "hydra.run.dir=logs/one")
    assert first.code == 0, first.output
    ranks = records(project / "logs/one")
    assert [(rank["world"], rank["directory"], rank["step"]) for rank in ranks] == [(2, str(project), 4)] * 2
    assert ranks[0]["loss"] == ranks[1]["loss"]
    assert _only(project / "logs").name == "one"
    assert _files(project / "logs/one") == {*_WRITTEN_ONCE, "rank0.json", "rank1.json"}
    for words in ("tokens/s", "test_loss", f"last checkpoint {project}/logs/one/checkpoints/last.ckpt"):
        assert first.output.count(words) == 1, first.output

    resume = ["ckpt_path=logs/one/checkpoints/last.ckpt", "trainer.max_steps=6", "hydra.run.dir=logs/two"]
    second = run_python(project, *_TRAIN, "recipe=tiny", *resume)
    assert second.code == 0, second.output
    assert [rank["step"] for rank in records(project / "logs/two")] == [6, 6]


def test_a_tensor_parallel_run_explains_itself_once(project: Path) -> None:
    run = ("recipe=tiny", "strategy=tensor", "explain=true", "hydra.run.dir=logs/one")
    plan = "+strategy.tensor_plan={*.up:replicate}"
    for overrides, told in (
        ((), "257 rows are not a multiple of 2"),
        ((plan,), "[plan] tensor_plan['*.up']='replicate'"),
    ):
        finished = run_python(project, *_TRAIN, *run, *overrides)
        assert finished.code == 0, finished.output
        ranks = records(project / "logs/one")
        assert ranks[0]["loss"] == ranks[1]["loss"]
        assert finished.output.count("tensor axis  2 ranks") == 1, finished.output
        assert told in finished.output, finished.output


def test_a_users_program_sweeps_with_two_processes_for_each_job(project: Path) -> None:
    sweep = ["-m", "recipe=tiny", "model.optimizer.lr=0.1,0.2", "optimized_metric=test_loss"]
    finished = run_python(project, "-m", "package.run", "--config-dir", "conf", *sweep)
    assert finished.code == 0, finished.output
    jobs = _only(project / "logs/tiny/multiruns")
    assert {path.name for path in jobs.iterdir()} == {"0", "1", "multirun.yaml"}
    for number, rate in enumerate((0.1, 0.2)):
        ranks = records(jobs / str(number))
        assert [(rank["world"], rank["lr"]) for rank in ranks] == [(2, rate)] * 2
        assert ranks[0]["loss"] == ranks[1]["loss"]
        assert _files(jobs / str(number)) == {*_WRITTEN_ONCE, "rank0.json", "rank1.json"}


def test_ranks_of_torchrun_agree_on_jobs_and_directories(project: Path) -> None:
    sweep = ["-m", "recipe=tiny", "trainer.devices=auto", "strategy.zero_stage=1,3"]
    finished = run_python(project, *_TORCHRUN, *_TRAIN, *sweep)
    assert finished.code == 0, finished.output
    jobs = _only(project / "logs/tiny/multiruns")
    for number in ("0", "1"):
        ranks = records(jobs / number)
        assert [rank["world"] for rank in ranks] == [2, 2]
        assert ranks[0]["loss"] == ranks[1]["loss"]
        assert _files(jobs / number) == {*_WRITTEN_ONCE, "rank0.json", "rank1.json"}


def test_two_nodes_train_and_resume_from_working_directories_of_their_own(project: Path, tmp_path: Path) -> None:
    nodes = [project, shutil.copytree(project, tmp_path / "another node")]

    def run(*overrides: str) -> list[Finished]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launch = (*_NODE, "--master-port", str(port))
        world = ("recipe=tiny", "trainer.devices=1", "trainer.num_nodes=2", *overrides)
        with ThreadPoolExecutor(2) as both:
            started = [
                both.submit(run_python, node, *launch, "--node-rank", str(rank), *_TRAIN, *world)
                for rank, node in enumerate(nodes)
            ]
            return [node.result() for node in started]

    first = run("hydra.run.dir=logs/one")
    second = run("hydra.run.dir=logs/two", "ckpt_path=logs/one/checkpoints/last.ckpt", "trainer.max_steps=6")
    assert [node.code for node in (*first, *second)] == [0] * 4, "\n".join(n.output for n in (*first, *second))
    ranks = records(project / "logs/two")
    assert [(rank["world"], rank["step"]) for rank in ranks] == [(2, 6)] * 2
    assert [rank["directory"] for rank in ranks] == [str(node) for node in nodes]
    assert ranks[0]["loss"] == ranks[1]["loss"]


def test_a_program_without_hydra_is_started_again_as_it_was(project: Path) -> None:
    finished = run_python(project, "plain.py", "3")
    assert finished.code == 0, finished.output
    assert records(project) == [[2, 3], [2, 3]]


def test_a_rank_that_fails_takes_the_others_with_it(project: Path) -> None:
    finished = run_python(project, *_TRAIN, "recipe=tiny", "callbacks.recorder.fail_on=1")
    assert finished.code != 0
    assert "rank 1 fails on purpose" in finished.output


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["strategy.zero_stge=1"], "fix: strategy.zero_stage"),
        (["strategy.zero_stage=5"], "zero_stage=5 must be"),
        (["batch.global_size=3"], "batch.global_size 2 or 4"),
        (["callbacks.recorder._target_=own.Recoder"], "fix: own.Recorder"),
        (["strategy=tensor", "+strategy.tensor_plan={*.atention:row}"], "'*.atention', which matches no module"),
    ],
)
def test_an_impossible_run_ends_with_one_message(project: Path, overrides: list[str], text: str) -> None:
    finished = run_python(project, *_TRAIN, "recipe=tiny", *overrides)
    assert finished.code != 0
    assert text in finished.output
    assert finished.output.count("lightning-3d: error:") == 1
    assert "Traceback" not in finished.output
