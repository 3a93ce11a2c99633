"""LightningCLI builds the strategy: from flags, from YAML, by its registered names, with help for every argument."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_3d import Mesh3DStrategy

_YAML = """
trainer:
  accelerator: cpu
  devices: 4
  strategy:
    class_path: lightning_3d.Mesh3DStrategy
    init_args:
      data_parallel_size: auto
      pipeline_parallel_size: 2
      num_microbatches: 3
      layers_per_stage: [3, 1]
      pipeline_stack: [encoder, decoder]
      tensor_plan: {"*.qkv": "column:3"}
      timeout_seconds: 0.5
"""


Build = Callable[..., Mesh3DStrategy]


@pytest.fixture
def strategy_of(monkeypatch: pytest.MonkeyPatch) -> Build:
    # Lightning calls jsonargparse in its old way.
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

    def build(*arguments: str) -> Mesh3DStrategy:
        monkeypatch.setattr(sys, "argv", ["program", "--trainer.accelerator=cpu", *arguments])
        cli = LightningCLI(BoringModel, run=False, save_config_callback=None, seed_everything_default=False)
        assert isinstance(cli.trainer.strategy, Mesh3DStrategy)
        return cli.trainer.strategy

    return build


def test_flags(strategy_of: Build) -> None:
    strategy = strategy_of(
        "--trainer.devices=4",
        "--trainer.strategy=Mesh3DStrategy",
        "--trainer.strategy.tensor_parallel_size=2",
        "--trainer.strategy.zero_stage=2",
        "--trainer.strategy.sequence_parallel=true",
    )
    config = strategy.config
    assert (config.tensor_parallel_size, config.zero_stage, config.sequence_parallel) == (2, 2, True)
    assert strategy.mesh_spec.world == 4


def test_yaml_and_a_flag_over_it(strategy_of: Build, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(_YAML)
    config = strategy_of(f"--config={tmp_path / 'run.yaml'}", "--trainer.strategy.pipeline_schedule=gpipe").config
    expected: dict[str, Any] = {
        "data_parallel_size": "auto",
        "pipeline_parallel_size": 2,
        "num_microbatches": 3,
        "layers_per_stage": [3, 1],
        "pipeline_stack": ["encoder", "decoder"],
        "tensor_plan": {"*.qkv": "column:3"},
        "timeout_seconds": 0.5,
        "pipeline_schedule": "gpipe",
    }
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize("stage", range(4))
def test_registered_names(strategy_of: Build, stage: int) -> None:
    assert strategy_of("--trainer.devices=1", f"--trainer.strategy=mesh_3d_zero{stage}").config.zero_stage == stage


def test_help_names_every_argument_and_what_it_is_for(strategy_of: Build, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        strategy_of("--trainer.strategy.help=Mesh3DStrategy")
    assert end.value.code == 0
    text = capsys.readouterr().out
    for name in ("pipeline_parallel_size", "zero_stage", "activation_checkpointing", "start_method"):
        assert f"--trainer.strategy.{name}" in text
    assert "Degree of the pipeline axis." in text


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("--trainer.strategy.zero_stage=five", "zero_stage"),
        ("--trainer.strategy.zero_stge=1", "zero_stge"),
        ("--trainer.strategy.zero_stage=7", "zero_stage=7 must be"),
    ],
)
def test_wrong_arguments_are_told(
    strategy_of: Build, argument: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, ValueError)) as error:
        strategy_of("--trainer.devices=1", "--trainer.strategy=Mesh3DStrategy", argument)
    assert text in capsys.readouterr().err + str(error.value)
