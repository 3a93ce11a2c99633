"""What Lightning's callbacks are told of a mesh."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning, ModelSummary
from torch import nn

from lightning_3d.cli import VERBS
from lightning_3d.errors import BatchError, ModuleError
from lightning_3d.strategy.run import evaluate_without_inference_mode
from lightning_3d.strategy.setup.callbacks import MeshThroughput, refuse_callbacks
from lightning_3d.strategy.setup.summaries import WholeSummaries


def _trainer(*callbacks: Callback) -> L.Trainer:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, callbacks=list(callbacks), **quiet
    )


def _worked(throughput: Throughput) -> dict[str, float]:
    for second in range(3):
        count = second + 1
        throughput.update(time=10.0 * count, batches=count, samples=8 * count, lengths=80 * count, flops=1000)
    return throughput.compute()


@pytest.mark.parametrize(("data", "sharing"), [(1, 1), (1, 4), (2, 1), (3, 2)])
def test_throughput_counts_what_data_ranks_do(data: int, sharing: int) -> None:
    plain = Throughput(available_flops=500.0, world_size=data * sharing, window_size=3)
    found = _worked(MeshThroughput(plain, data=data, sharing=sharing))
    per_second = {"batches": 0.1, "samples": 0.8, "items": 8.0, "flops": 100.0}
    for unit, each in per_second.items():
        assert found[f"{unit}_per_sec"] == pytest.approx(each * data)
        assert found[f"device/{unit}_per_sec"] == pytest.approx(each / sharing)
    assert found["device/mfu"] == pytest.approx(100.0 / sharing / 500.0)
    assert (found["samples"], found["batches"]) == (24, 3)


def test_throughput_without_a_model_group_is_lightnings() -> None:
    plain = Throughput(available_flops=500.0, world_size=2, window_size=3)
    mine = _worked(MeshThroughput(plain, data=2, sharing=1))
    assert mine == pytest.approx(_worked(plain))


def test_a_search_for_a_batch_size_is_refused_without_promising_what_does_not_exist() -> None:
    with pytest.raises(BatchError, match="BatchSizeFinder enlarges the batch") as refused:
        refuse_callbacks(_trainer(BatchSizeFinder()), cut=False)
    assert "plan" in VERBS or "lightning-3d plan" not in str(refused.value)


def test_pruning_is_refused_where_parameters_are_divided() -> None:
    trainer = _trainer(ModelPruning("l1_unstructured"))
    refuse_callbacks(trainer, cut=False)
    with pytest.raises(ModuleError, match="ModelPruning puts a masked copy"):
        refuse_callbacks(trainer, cut=True)


def test_no_loop_evaluates_in_inference_mode() -> None:
    trainer = _trainer()
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    assert [loop.inference_mode for loop in loops[1:]] == [True, True, True]
    evaluate_without_inference_mode(trainer)
    assert not any(loop.inference_mode for loop in loops)


class _Shown(L.LightningModule):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6, device=device), nn.Linear(6, 2, device=device))
        self.example_input_array = torch.zeros(3, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)


def _attached(module: L.LightningModule, *callbacks: Callback) -> L.LightningModule:
    module.trainer = _trainer(*callbacks)
    module.trainer.strategy.connect(module)
    module.trainer._data_connector.attach_data(module)
    return module


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_summary_of_the_whole_is_the_one_of_one_device(device: str) -> None:
    callback = ModelSummary(max_depth=2)
    module = _attached(_Shown(device), callback)
    summaries = WholeSummaries()
    summaries.make(module)
    found = summaries.of(callback)
    expected = _attached(_Shown("cpu"), callback)
    assert str(found) == str(callback._summary(expected.trainer, expected))
    assert found.total_flops == 2 * 3 * (4 * 6 + 6 * 2)
    assert {parameter.device.type for parameter in module.parameters()} == {device}
    assert summaries.of(ModelSummary(max_depth=1)) is None


def test_a_summary_that_needs_values_is_left_to_lightning() -> None:
    class Reads(_Shown):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = self.net(inputs)
            return hidden if float(hidden.sum()) > 0 else -hidden

    callback = ModelSummary()
    module = _attached(Reads("cpu"), callback)
    summaries = WholeSummaries()
    summaries.make(module)
    assert summaries.of(callback) is None
    assert all(type(parameter.data) is torch.Tensor for parameter in module.parameters())
