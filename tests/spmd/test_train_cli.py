"""The command line in real processes: launched by itself and by torchrun, once and in sweeps."""

import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.marks import more
from tests.spmd.programs import Finished, records, run_python

pytestmark = [pytest.mark.spmd, pytest.mark.slow, pytest.mark.timeout(240)]

_TRAIN = ("-m", "lightning_3d", "train", "--config-dir", "conf")
_NODE = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return _project(tmp_path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """A project in which two processes have trained into ``logs/one``, and what they said."""
    directory = _project(tmp_path_factory.mktemp("trained"))
    return directory, run_python(directory, *_TRAIN, "recipe=tiny", "hydra.run.dir=logs/one")


def _project(parent: Path) -> Path:
    """Returns a user's directory: text, a recipe, a callback of their own, a program."""
    directory = parent / "a user's project"
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


def test_two_processes_train_and_test(trained: tuple[Path, Finished]) -> None:
    project, finished = trained
    assert finished.code == 0, finished.output
    ranks = records(project / "logs/one")
    assert [(rank["world"], rank["directory"], rank["step"]) for rank in ranks] == [(2, str(project), 4)] * 2
    assert ranks[0]["loss"] == ranks[1]["loss"]
    assert _only(project / "logs").name == "one"
    assert _files(project / "logs/one") == {*_WRITTEN_ONCE, "rank0.json", "rank1.json"}
    for words in ("tokens/s", "test_loss", f"last checkpoint {project}/logs/one/checkpoints/last.ckpt"):
        assert finished.output.count(words) == 1, finished.output


@pytest.mark.thorough
def test_nodes_resume_in_a_sweep_from_working_directories_of_their_own(
    trained: tuple[Path, Finished], tmp_path: Path
) -> None:
    nodes = [shutil.copytree(trained[0], tmp_path / name) for name in ("one node", "another node")]
    shutil.rmtree(nodes[1] / "logs")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = (*_NODE, "--master-port", str(port))
    world = ("trainer.devices=auto", "trainer.num_nodes=2", "strategy.zero_stage=1,3")
    run = ("-m", "recipe=tiny", "ckpt_path=logs/one/checkpoints/last.ckpt", "trainer.max_steps=6", *world)
    with ThreadPoolExecutor(2) as both:
        started = [
            both.submit(run_python, node, *launch, "--node-rank", str(rank), *_TRAIN, *run)
            for rank, node in enumerate(nodes)
        ]
        finished = [node.result() for node in started]
    assert [node.code for node in finished] == [0, 0], "\n".join(node.output for node in finished)
    jobs = _only(nodes[0] / "logs/tiny/multiruns")
    for number, stage in enumerate((1, 3)):
        ranks = records(jobs / str(number))
        assert [(rank["world"], rank["step"], rank["zero_stage"]) for rank in ranks] == [(2, 6, stage)] * 2
        assert [rank["directory"] for rank in ranks] == [str(node) for node in nodes]
        assert ranks[0]["loss"] == ranks[1]["loss"]
        assert _files(jobs / str(number)) == {*_WRITTEN_ONCE, "rank0.json", "rank1.json"}
    assert not (nodes[1] / "logs").exists()


@pytest.mark.thorough
def test_jobs_of_a_sweep_on_the_tensor_axis_explain_themselves_once(project: Path) -> None:
    plans = ({}, {"*.up": "replicate"})
    sweep = ("-m", "recipe=tiny", "strategy=tensor", "explain=true", "strategy.tensor_plan={},{*.up:replicate}")
    finished = run_python(project, *_TRAIN, *sweep)
    assert finished.code == 0, finished.output
    jobs = _only(project / "logs/tiny/multiruns")
    assert {path.name for path in jobs.iterdir()} == {"0", "1", "multirun.yaml"}
    for number, plan in enumerate(plans):
        ranks = records(jobs / str(number))
        assert [(rank["world"], rank["plan"]) for rank in ranks] == [(2, plan)] * 2
        assert ranks[0]["loss"] == ranks[1]["loss"]
        assert _files(jobs / str(number)) == {*_WRITTEN_ONCE, "rank0.json", "rank1.json"}
    for words, times in (
        ("tensor axis  2 ranks", 2),
        ("257 rows are not a multiple of 2", 2),
        # A weight and a bias, in one of the jobs.
        ("[plan] tensor_plan['*.up']='replicate'", 2),
    ):
        assert finished.output.count(words) == times, finished.output


def test_a_program_without_hydra_is_started_again_as_it_was(project: Path) -> None:
    finished = run_python(project, "plain.py", "3")
    assert finished.code == 0, finished.output
    assert records(project) == [[2, 3], [2, 3]]


def test_a_rank_that_fails_takes_the_others_with_it(project: Path) -> None:
    finished = run_python(project, *_TRAIN, "recipe=tiny", "callbacks.recorder.fail_on=1")
    assert finished.code != 0
    assert "rank 1 fails on purpose" in finished.output


@pytest.mark.thorough
def test_a_job_that_torchrun_starts_again_goes_on_in_its_directory(project: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    given = ("recipe=tiny", "trainer.devices=auto", "callbacks.recorder.dies=1")
    finished = run_python(project, *launch, *_TRAIN, *given)
    assert finished.code == 0, finished.output
    job = _only(project / "logs/tiny/runs")
    assert f"it goes on from step 3, from {job}/checkpoints/" in finished.output
    assert [(rank["world"], rank["step"]) for rank in records(job)] == [(2, 4)] * 2
    assert _files(job) == {*_WRITTEN_ONCE, "rank0.json", "rank1.json", "died"}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["strategy.zero_stge=1"], "fix: strategy.zero_stage"),
        more(["strategy.zero_stage=5"], "zero_stage=5 must be"),
        (["batch.global_size=3"], "batch.global_size 2 or 4"),
        more(["callbacks.recorder._target_=own.Recoder"], "fix: own.Recorder"),
        (["strategy=tensor", "+strategy.tensor_plan={*.atention:row}"], "'*.atention', which matches no module"),
    ],
)
def test_an_impossible_run_ends_with_one_message(project: Path, overrides: list[str], text: str) -> None:
    finished = run_python(project, *_TRAIN, "recipe=tiny", *overrides)
    assert finished.code != 0
    assert text in finished.output
    assert finished.output.count("lightning-3d: error:") == 1
    assert "Traceback" not in finished.output
