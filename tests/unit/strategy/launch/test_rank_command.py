import sys
from collections.abc import Iterator
from pathlib import Path

import hydra
import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict

from lightning_3d.errors import ConfigError
from lightning_3d.strategy.launch.rank_command import path_override, rank_arguments, rank_command

_DIRECTORY = "/runs/a=1,b='x' {y}"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Path]:
    """A job of a sweep, as Hydra leaves it in its own configuration."""
    (tmp_path / "main.yaml").write_text("a: 0\n")
    overrides = ["a=1", "+b='x, y'", "hydra.mode=MULTIRUN", "hydra.job.chdir=true", "hydra.sweep.dir=many"]
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        cfg = hydra.compose("main", overrides=overrides, return_hydra_config=True)
    OmegaConf.set_readonly(cfg.hydra, False)
    with open_dict(cfg):
        cfg.hydra.runtime.output_dir = _DIRECTORY
        cfg.hydra.runtime.cwd = str(tmp_path)
        cfg.hydra.job.num = 3
    HydraConfig.instance().set_config(cfg)
    yield tmp_path
    HydraConfig.instance().cfg = None


def test_a_rank_repeats_one_job_of_the_sweep(job: Path) -> None:
    arguments = rank_arguments()
    assert arguments[:4] == ["--config-name", "main", "--config-path", str(job)]
    words = [word for word in arguments[4:] if not word.startswith("hydra")]
    assert words == ["a=1", "+b='x, y'"]
    assert "hydra.job.num=3" in arguments
    assert "hydra.job.chdir=true" in arguments
    assert [word for word in arguments if word.startswith("hydra.mode")] == ["hydra.mode=RUN"]


def test_a_rank_uses_the_directory_of_the_job_and_writes_no_logs(job: Path) -> None:
    parsed = OverridesParser.create().parse_overrides(rank_arguments()[4:])
    values = {override.key_or_group: override.value() for override in parsed}
    assert values["hydra.run.dir"] == _DIRECTORY
    assert values["hydra.output_subdir"] is None
    assert values["hydra/job_logging"] == "none"


@pytest.mark.parametrize("path", ["plain", "a b", "it's", 'say "x"', "back\\slash", "a=1,b=[2]"])
def test_a_path_survives_hydras_grammar(path: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([path_override("key", path)])
    assert override.value() == path


def test_the_program_keeps_its_own_words(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["bin/tool", "train", "fast", "-m", "a=1,2"])
    command, directory = rank_command()
    assert command[:4] == [sys.executable, str(job / "bin/tool"), "train", "fast"]
    assert command[4:] == rank_arguments()
    assert directory == str(job)


def test_without_hydra_the_same_command_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["/bin/tool", "--epochs", "2"])
    assert rank_command() == ([sys.executable, "/bin/tool", "--epochs", "2"], None)


def test_a_job_inside_of_another_program_cannot_be_started_again(job: Path) -> None:
    cfg = HydraConfig.instance().cfg
    assert cfg is not None
    OmegaConf.set_readonly(cfg.hydra, False)
    cfg.hydra.launcher._target_ = "hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher"
    with pytest.raises(
        ConfigError, match=r"ray_launcher.RayLauncher runs the job inside a program of its own"
    ) as caught:
        rank_command()
    assert "hydra/launcher=basic" in str(caught.value.fix)
    # A launcher of sweeps is not asked where there is none.
    cfg.hydra.mode = RunMode.RUN
    assert rank_command()[1] == str(job)
