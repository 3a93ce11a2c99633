"""A project of a user's own with its habits: Hydra's groups, its own program, sweeps, resuming, four meshes."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict

from tests.spmd.programs import records, run_python

pytestmark = [
    pytest.mark.spmd,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    # As in the projects that this one is like, the network is among the hyperparameters.
    pytest.mark.filterwarnings("ignore:Attribute 'net'"),
]

_TEMPLATE = Path(__file__).parent / "template"
_MESHES = ("data", "tensor", "pipeline")
_EPOCHS = 5
# What pip makes of an entry point, for a package that is installed editable.
_CONSOLE_SCRIPT = """import sys
sys.path.append({root!r})
from digits.train import main
if __name__ == "__main__":
    sys.exit(main())
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("somewhere") / "a project"
    shutil.copytree(_TEMPLATE, directory, ignore=shutil.ignore_patterns("__pycache__"))
    generator = np.random.default_rng(0)
    (directory / "data").mkdir()
    table = np.hstack([generator.normal(size=(24, 8)), generator.integers(0, 3, size=(24, 1))])
    np.savetxt(directory / "data" / "digits.csv", table)
    return directory


@pytest.fixture(scope="module")
def first(project: Path) -> Path:
    """The jobs of a sweep that trains two epochs on each mesh, at a learning rate that the sweeper draws."""
    sweep = ["hparams_search=random", "experiment=tiny", f"strategy={','.join(_MESHES)}"]
    finished = run_python(project, "-m", "digits.train", *sweep)
    assert finished.code == 0, finished.output
    return _only(project / "logs/tiny/multiruns")


def _only(directory: Path) -> Path:
    (found,) = directory.iterdir()
    return found


def _ranks_agree(job: Path, world: int) -> dict[str, Any]:
    """Returns what every rank of a job saw."""
    ranks = records(job)
    assert [rank["world"] for rank in ranks] == [world] * world
    assert ranks == [ranks[0]] * world
    return dict(ranks[0])


def _files(job: Path) -> set[str]:
    files = (path.relative_to(job) for path in job.rglob("*") if path.is_file())
    return {str(path) for path in files if path.parts[0] != "checkpoints" and not path.name.startswith("rank")}


_WRITTEN_ONCE = {
    *(f".hydra/{name}.yaml" for name in ("config", "hydra", "overrides")),
    *(f"csv/version_0/{name}" for name in ("hparams.yaml", "metrics.csv")),
    "tiny.log",
}


@pytest.fixture(scope="module")
def one_device(project: Path, first: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """Losses by epoch of plain Lightning on one device, at the learning rate of the sweep."""
    rate = _ranks_agree(first / "0", 2)["rate"]
    output = tmp_path_factory.mktemp("one device")
    with (
        pytest.MonkeyPatch.context() as patch,
        hydra.initialize_config_dir(str(project / "configs"), version_base="1.3"),
    ):
        patch.setenv("PROJECT_ROOT", str(project))
        patch.syspath_prepend(project)
        own = [f"model.optimizer.lr={rate}", f"trainer.max_epochs={_EPOCHS}", f"data.data_dir='{project}/data'"]
        overrides = ["experiment=tiny", "strategy=one", "test=false", *own]
        cfg = hydra.compose("train.yaml", overrides, return_hydra_config=True)
        with open_dict(cfg):
            cfg.hydra.runtime.output_dir = str(output)
        HydraConfig.instance().set_config(cfg)
        try:
            from digits.train import train

            train(cfg)
        finally:
            HydraConfig.instance().cfg = None
    with (output / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return [
        {
            name: float(row[name])
            for row in rows
            for name in ("train/loss", "val/loss")
            if row[name] and row["epoch"] == f"{epoch}"
        }
        for epoch in range(_EPOCHS)
    ]


def _are_of_epoch(metrics: dict[str, float], expected: dict[str, float]) -> None:
    # torchmetrics accumulates in fp32.
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_a_sweep_trains_and_tests_on_each_mesh(first: Path, one_device: list[dict[str, float]]) -> None:
    assert {path.name for path in first.iterdir()} == {"0", "1", "2", "multirun.yaml", "returned.json"}
    jobs = [_ranks_agree(first / str(number), 2) for number in range(3)]
    assert len({job["rate"] for job in jobs}) == 1
    for number, (mesh, job) in enumerate(zip(_MESHES, jobs, strict=True)):
        drawn = f"model.optimizer.lr={job['rate']}"
        assert job["overrides"] == ["hparams_search=random", "experiment=tiny", f"strategy={mesh}", drawn]
        assert _files(first / str(number)) == _WRITTEN_ONCE
        assert OmegaConf.load(first / str(number) / ".hydra" / "hydra.yaml").hydra.mode == "MULTIRUN"
        assert Path(job["best"]).parent == first / str(number) / "checkpoints"
        _are_of_epoch(job["metrics"], one_device[1])
    returned = json.loads((first / "returned.json").read_text())
    assert returned == [job["metrics"]["test/loss"] for job in jobs]
    assert returned == pytest.approx([returned[0]] * 3, rel=1e-9)


@pytest.mark.thorough
def test_the_program_resumes_from_another_directory(
    project: Path, first: Path, one_device: list[dict[str, float]], tmp_path: Path
) -> None:
    shutil.copytree(project / "data", tmp_path / "d")
    runs = [f"ckpt_path='{first}/${{hydra:job.num}}/checkpoints/last.ckpt'", "trainer.max_epochs=4"]
    own = ["paths.data_dir=d", "hydra.sweep.dir='second sweep'", "strategy=tensor,pipeline,data"]
    finished = run_python(tmp_path, str(project / "digits/train.py"), "-m", "experiment=tiny", *runs, *own)
    assert finished.code == 0, finished.output
    for number in range(3):
        job = _ranks_agree(tmp_path / "second sweep" / str(number), 2)
        assert (job["directory"], job["epochs"], job["returned"]) == (str(tmp_path), 4, None)
        _are_of_epoch(job["metrics"], one_device[3])


@pytest.mark.thorough
def test_a_console_script_goes_on_with_all_axes(
    project: Path, first: Path, one_device: list[dict[str, float]], tmp_path: Path
) -> None:
    script = project / "bin" / "train-digits"
    script.parent.mkdir()
    script.write_text(_CONSOLE_SCRIPT.format(root=str(project)))
    checkpoint = first / "2" / "checkpoints" / "last.ckpt"
    mesh = ["strategy=3d", "trainer.devices=8", "trainer.max_epochs=5", f"ckpt_path='{checkpoint}'"]
    finished = run_python(project, str(script), "experiment=tiny", "task_name=all", *mesh)
    assert finished.code == 0, finished.output
    run = _only(project / "logs/all/runs")
    job = _ranks_agree(run, 8)
    _are_of_epoch(job["metrics"], one_device[4])
    assert _files(run) == {*(_WRITTEN_ONCE - {"tiny.log"}), "all.log"}

    state = torch.load(Path(job["best"]) / "meta.pt", weights_only=True)
    notes = f"all in {run}"
    assert state["hyper_parameters"]["settings"] == {
        "classes": 3,
        "smoothing": 0.1,
        "notes": notes,
        "thresholds": [0.5, 0.9],
    }
    assert state["datamodule_hyper_parameters"]["settings"] == {"data_dir": "data", "batch_size": 16, "notes": notes}
