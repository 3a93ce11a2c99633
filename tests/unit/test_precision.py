from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.plugins.precision import FSDPPrecision
from torch import nn
from torch.amp.grad_scaler import GradScaler

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from lightning_3d.errors import ConfigError
from lightning_3d.precision import PRECISIONS


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("32-true", "32-true"),
        ("64-true", "64-true"),
        ("bf16-true", "bf16-true"),
        ("16-true", "16-true"),
        ("bf16-mixed", "bf16-mixed"),
        (32, "32-true"),
        # Lightning has no fp16 autocast on the CPU.
        ("16-mixed", "bf16-mixed"),
    ],
)
@pytest.mark.filterwarnings("ignore:You passed `Trainer\\(accelerator='cpu', precision='16-mixed'\\)`:UserWarning")
def test_precision_of_the_trainer_becomes_the_meshs(given: Any, expected: str) -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=Mesh3DStrategy(), precision=given, logger=False)
    assert isinstance(trainer.precision_plugin, Mesh3DPrecision)
    assert trainer.precision_plugin.precision == trainer.precision == expected


def test_plugin_of_the_user_is_kept() -> None:
    plugin = Mesh3DPrecision("bf16-master")
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy=Mesh3DStrategy(), plugins=plugin, logger=False)
    assert trainer.precision_plugin is plugin


@pytest.mark.parametrize(
    "plugin",
    [
        Precision(),
        DoublePrecision(),
        HalfPrecision("bf16-true"),
        HalfPrecision("16-true"),
        MixedPrecision("bf16-mixed", "cpu"),
    ],
    ids=lambda plugin: str(plugin.precision),
)
def test_plugins_of_lightning_are_converted(plugin: Precision) -> None:
    converted = Mesh3DPrecision.from_lightning(plugin)
    assert converted.precision == plugin.precision
    batch = {"x": torch.ones(2), "ids": torch.arange(2)}
    ours, theirs = converted.convert_input(batch), plugin.convert_input(batch)
    assert [tensor.dtype for tensor in ours.values()] == [tensor.dtype for tensor in theirs.values()]
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert converted.convert_module(module).weight.dtype == plugin.convert_module(other).weight.dtype
    with converted.forward_context(), plugin.forward_context():
        assert torch.is_autocast_enabled("cpu") is ("mixed" in str(plugin.precision))


def test_a_scalers_settings_are_taken_over() -> None:
    scaler = GradScaler("cpu", init_scale=64.0, growth_interval=7, growth_factor=3.0, backoff_factor=0.25)
    converted = Mesh3DPrecision.from_lightning(MixedPrecision("16-mixed", "cpu", scaler))
    converted.join_mesh("cpu", None, clipper=None)  # type: ignore[arg-type]
    found = converted.scaler
    assert found is not None
    assert (found.get_scale(), found.get_growth_interval()) == (64.0, 7)
    assert (found.get_growth_factor(), found.get_backoff_factor()) == (3.0, 0.25)
    assert float(converted.scaled(torch.tensor(2.0))) == 128.0


@pytest.mark.parametrize("name", PRECISIONS)
def test_only_master_weights_are_cast_as_they_gather(name: str) -> None:
    precision = Mesh3DPrecision(name)
    policy = precision.fsdp_policy()
    assert precision.shards_cast is (name == "bf16-master")
    expected = (torch.bfloat16, torch.float32) if precision.shards_cast else (None, None)
    assert (policy.param_dtype, policy.reduce_dtype) == expected


def test_what_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'bf16-mixd(?s:.*)fix: Mesh3DPrecision\("bf16-mixed"\)'):
        Mesh3DPrecision("bf16-mixd")
    with pytest.raises(ConfigError, match="does not scale the loss"):
        Mesh3DPrecision("32-true", scaler=GradScaler("cpu"))
    with pytest.raises(ConfigError, match="FSDPPrecision"):
        Mesh3DPrecision.from_lightning(FSDPPrecision("32-true"))
