"""The verb refuses what it cannot verify, before a process is started."""

from pathlib import Path

import pytest

from lightning_3d.config.compose import compose_run
from lightning_3d.errors import ConfigError
from lightning_3d.verify import Certificate, run, verifier
from lightning_3d.verify.command import _prepare
from lightning_3d.verify.runs import Request


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["strategy=single"], "has no mesh to compare with one device"),
        (["recipe=demo", "trainer.devices=1", "strategy=default"], "there is nothing to compare"),
        (["recipe=demo", "precision=64"], "precision='64' does not exist"),
        (["recipe=demo", "layers=0"], "layers=0 is too small"),
        (["recipe=demo", "trainer.devices=many"], "trainer.devices=many names no device"),
    ],
)
def test_impossible_configurations(overrides: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        run([*overrides, f"hydra.run.dir={tmp_path}", "hydra/job_logging=none", "hydra/hydra_logging=none"])


def test_the_trainer_options_of_python_are_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(request: Request, precision: str) -> Certificate:
        raise ConfigError(str(dict(request.trainer)))

    monkeypatch.setattr(verifier, "certify", asked)
    words = ["trainer.gradient_clip_val=1.0", "+trainer.sync_batchnorm=true", "+trainer.detect_anomaly=true"]
    with pytest.raises(ConfigError, match=r"'gradient_clip_val': 1\.0.*'sync_batchnorm': True, 'detect_anomaly': True"):
        run(["recipe=demo", *words, f"hydra.run.dir={tmp_path}", "hydra/job_logging=none", "hydra/hydra_logging=none"])


def test_a_launcher_outside_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ConfigError, match="verify starts its processes itself"):
        run(["recipe=demo"])


@pytest.mark.parametrize(
    ("overrides", "world", "local"),
    [
        (["recipe=demo"], 8, 8),
        (["recipe=demo", "trainer.devices=auto", "strategy=tensor"], 4, 8),
        (["recipe=demo", "trainer.devices=[0,1]", "strategy=tensor"], 2, 16),
    ],
)
def test_the_batch_of_a_data_rank_follows_from_the_mesh(overrides: list[str], world: int, local: int) -> None:
    cfg = compose_run(overrides, config_name="verify")
    options, mesh = _prepare(cfg)
    assert (mesh.world, cfg.batch.local_size) == (world, local)
    assert options["micro_batch_size"] == 2
