import os
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from lightning_3d.config.compose import compose_run
from lightning_3d.errors import BatchError, CheckpointError, ConfigError, Lightning3DError, MeshError
from lightning_3d.train.prepare import _NODE_VARIABLES, prepare

_OVERRIDES = ("trainer.accelerator=cpu", "paths.output_dir=out")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


def _composed(*overrides: str) -> DictConfig:
    return compose_run([*_OVERRIDES, *overrides])


@pytest.mark.parametrize(
    ("overrides", "local"),
    [
        (["trainer.devices=1"], 32),
        (["trainer.devices=auto"], 32),
        (["trainer.devices=4"], 8),
        (["trainer.devices='4'"], 8),
        (["trainer.devices=[0,1]"], 16),
        (["trainer.devices=4", "trainer.num_nodes=2"], 4),
        (["trainer.devices=4", "strategy=single"], 32),
        (["trainer.devices=4", "strategy=ddp"], 8),
        (["trainer.devices=4", "strategy=hybrid"], 8),
        (["trainer.devices=2", "batch.global_size=null"], None),
    ],
)
def test_the_batch_of_a_rank_follows_from_the_mesh(
    overrides: list[str], local: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NODE_RANK", "0")
    cfg = _composed(*overrides)
    prepare(cfg)
    assert cfg.batch.local_size == local
    assert cfg.data.batch_size == local


def test_several_nodes_need_something_that_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in _NODE_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="nothing says which node this is"):
        prepare(_composed("trainer.devices=1", "trainer.num_nodes=2"))


def test_preparing_twice_changes_nothing() -> None:
    cfg = _composed("trainer.devices=2")
    prepare(cfg)
    once = OmegaConf.to_container(cfg)
    prepare(cfg)
    assert OmegaConf.to_container(cfg) == once


@pytest.mark.parametrize(
    ("overrides", "error", "text"),
    [
        (["strategy.zero_stage=5"], ConfigError, "zero_stage=5"),
        (["+strategy.zero_stge=1"], ConfigError, "did you mean zero_stage"),
        (["strategy.data_parallel_size=3", "trainer.devices=2"], MeshError, "there are 2 processes"),
        (["batch.global_size=15", "trainer.devices=2"], BatchError, "batch.global_size 14 or 16"),
        (["batch.local_size=3"], ConfigError, "batch.local_size=3 does not follow"),
        (["batch.micro_size=4", "strategy.num_microbatches=2"], BatchError, "disagree"),
        (["batch.global_size=many"], ConfigError, "many"),
        (["trainer.devices=0"], ConfigError, "names no device"),
        (["trainer.devices=two"], ConfigError, "names no device"),
        (["seed=abc"], ConfigError, "abc"),
        (["ckpt_path=nowhere.ckpt"], CheckpointError, "ckpt_path=nowhere.ckpt does not exist"),
        (["model.model._target_=lightning_3d.reference.gpt.GTP"], ConfigError, "fix: lightning_3d.reference.gpt.GPT"),
        (["data._target_=nowhere.Data"], ConfigError, "run in the directory that holds nowhere"),
    ],
)
def test_the_impossible_is_refused(overrides: list[str], error: type[Lightning3DError], text: str) -> None:
    cfg = _composed(*overrides)
    with pytest.raises(error) as caught:
        prepare(cfg)
    assert text in str(caught.value)


def test_last_is_the_newest_checkpoint_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="finds no checkpoints"):
        prepare(_composed("ckpt_path=last"))
    for age, run in enumerate(("train/runs/new", "train/runs/old", "other/runs/newest")):
        checkpoint = tmp_path / "logs" / run / "checkpoints" / "last.ckpt"
        checkpoint.mkdir(parents=True)
        os.utime(checkpoint, (1000 - age, 1000 - age if "newest" not in run else 2000))
    assert prepare(_composed("ckpt_path=last")).ckpt_path == str(tmp_path / "logs/train/runs/new/checkpoints/last.ckpt")
    # A signal came after that.
    asked = tmp_path / "logs/train/runs/old/checkpoints/sigterm-step=7.ckpt"
    asked.mkdir()
    assert prepare(_composed("ckpt_path=last")).ckpt_path == str(asked)


def test_a_checkpoint_is_found_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "last.ckpt").mkdir()
    monkeypatch.chdir(tmp_path)
    cfg = _composed("ckpt_path=last.ckpt")
    assert prepare(cfg).ckpt_path == cfg.ckpt_path == str(tmp_path / "last.ckpt")
    assert prepare(_composed("ckpt_path=best")).ckpt_path == "best"


def _under_torchrun(monkeypatch: pytest.MonkeyPatch, world: int, local: int) -> None:
    variables: dict[str, Any] = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def test_torchrun_decides_the_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    _under_torchrun(monkeypatch, world=8, local=4)
    cfg = _composed()
    prepare(cfg)
    assert (cfg.trainer.devices, cfg.trainer.num_nodes, cfg.batch.local_size) == (4, 2, 4)


def test_a_trainer_that_disagrees_with_torchrun_is_told_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    _under_torchrun(monkeypatch, world=8, local=4)
    with pytest.raises(ConfigError, match="torchrun started 8 processes, 4 of them") as caught:
        prepare(_composed("trainer.devices=4"))
    assert "trainer.devices=4 trainer.num_nodes=2" in str(caught.value)
