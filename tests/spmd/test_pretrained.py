"""Pretrained weights: read by each rank into its parts on any mesh, and by ``from_pretrained`` in ``__init__``."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DStrategy
from tests.marks import more
from tests.spmd.fits import QUIET, loader
from tests.spmd.pool import SpmdError, run_spmd
from tests.spmd.tensor_runs import assert_same, tokens
from tests.spmd.tuned import Tuned, save_model, tuned

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]

CUBE: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}


def assert_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == {f"model.{name}" for name in expected}
    for name, value in expected.items():
        assert torch.equal(found[f"model.{name}"], value), name


@pytest.mark.parametrize(
    ("kind", "world", "strategy", "late"),
    [
        ("llama", 8, CUBE, False),
        ("gpt2", 4, CUBE | {"zero_stage": 3}, True),
        ("mixtral", 4, CUBE, True),
        ("odd", 2, {"tensor_parallel_size": 2, "pad_vocabulary": True, "zero_stage": 0}, False),
        more("gpt2", 2, {"zero_stage": 0}, True),
        more("gpt2", 2, {"zero_stage": 3, "cpu_offload": True}, False),
        more("gpt2", 4, {"zero_stage": 2, "data_replicate_size": 2}, True),
        more("llama", 4, {"pipeline_parallel_size": 2, "zero_stage": 3}, True),
        more("odd", 8, CUBE | {"pad_vocabulary": True, "zero_stage": 3}, True),
    ],
)
def test_every_rank_reads_its_parts(
    tmp_path: Path, kind: str, world: int, strategy: dict[str, Any], late: bool
) -> None:
    stored = save_model(kind, tmp_path / "hf")
    chosen = {**strategy, "pretrained": str(tmp_path / "hf")}
    found = run_spmd(tuned, world, kind, chosen, late=late, timeout=120)
    data = world // (strategy.get("pipeline_parallel_size", 1) * strategy.get("tensor_parallel_size", 1))
    (alone,) = run_spmd(tuned, 1, kind, {"num_microbatches": 2 * data}, directory=tmp_path / "hf", timeout=60)
    for each in found:
        assert_bits(each["start"], stored)
        assert_same(each["losses"], alone["losses"], kind, close=1e-4)


@pytest.mark.parametrize(
    ("kind", "strategy"), [("llama", CUBE), more("gpt2", CUBE), more("mixtral", CUBE)], ids=["llama", "gpt2", "mixtral"]
)
def test_from_pretrained_in_init_fine_tunes_on_a_cube(tmp_path: Path, kind: str, strategy: dict[str, Any]) -> None:
    stored = save_model(kind, tmp_path)
    found = run_spmd(tuned, 8, kind, strategy, directory=tmp_path, timeout=120)
    (alone,) = run_spmd(tuned, 1, kind, {"num_microbatches": 4}, directory=tmp_path, timeout=60)
    for each in found:
        assert_bits(each["start"], stored)
        assert_same(each["losses"], alone["losses"], kind, close=1e-4)
        # The keys' biases have no gradient, so AdamW steps on what is left of rounding: compared with the step size.
        for name, value in alone["end"].items():
            torch.testing.assert_close(each["end"][name], value, rtol=0, atol=6e-5)


def test_weights_of_our_checkpoints_and_a_checkpoint_that_wins(tmp_path: Path) -> None:
    hf, ours = tmp_path / "hf", tmp_path / "ours.ckpt"
    save_model("gpt2", hf)
    run_spmd(tuned, 2, "gpt2", {"tensor_parallel_size": 2}, save=ours, timeout=60)
    (first, _) = run_spmd(tuned, 2, "gpt2", {"pipeline_parallel_size": 2, "pretrained": str(ours)}, timeout=60)
    resumed, _ = run_spmd(
        tuned,
        2,
        "gpt2",
        {"zero_stage": 3, "pretrained": str(hf)},
        resume=ours,
        epochs=2,
        save=tmp_path / "b",
        timeout=60,
    )
    assert_same(resumed["start"], first["start"], "resumed", close=0)
    assert len(resumed["losses"]) == 2


def test_weights_of_another_model_are_one_error_on_every_rank(tmp_path: Path) -> None:
    save_model("gpt2", tmp_path)
    with pytest.raises(SpmdError, match=r"no name in .* is one of Tuned") as caught:
        run_spmd(tuned, 2, "llama", {"pipeline_parallel_size": 2, "pretrained": str(tmp_path)}, timeout=60)
    assert str(caught.value).count("CheckpointError") >= 2


class Averages(Callback):
    """Keeps an average of the weights, one of zeros and a list of copies, all made before the module is cut."""

    def setup(self, trainer: Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.average, self.zeros = AveragedModel(pl_module), AveragedModel(pl_module)
        self.copies = [parameter.detach().clone() for parameter in pl_module.parameters()]
        for parameter in self.zeros.parameters():
            parameter.detach().zero_()

    def on_train_start(self, trainer: Trainer, pl_module: L.LightningModule) -> None:
        own = [local(parameter) for parameter in pl_module.parameters()]
        self.follows = [torch.equal(local(p), q) for p, q in zip(self.average.module.parameters(), own, strict=True)]
        self.follows += [torch.equal(local(p), q) for p, q in zip(self.copies, own, strict=True)]
        self.zero = [not local(p).any() for p in self.zeros.module.parameters()]


def local(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return torch.zeros(())
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def averaged(rank: int, world: int, directory: str) -> tuple[bool, bool]:
    kept = Averages()
    chosen = Mesh3DStrategy(num_microbatches=2, pipeline_parallel_size=2, tensor_parallel_size=2, pretrained=directory)
    trainer = L.Trainer(**QUIET, devices=world, strategy=chosen, max_epochs=1, callbacks=[kept])
    trainer.fit(Tuned("gpt2").train(), loader(tokens(1)))
    return all(kept.follows), all(kept.zero)


def test_averages_begin_where_the_module_does(tmp_path: Path) -> None:
    save_model("gpt2", tmp_path)
    assert run_spmd(averaged, 4, str(tmp_path), timeout=60) == [(True, True)] * 4


WIDTH, LAYERS = 1024, 24


class Wide(L.LightningModule):
    """96 MiB of weights in 24 tensors, made on the meta device or read whole."""

    def __init__(self, directory: str | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        if directory is not None:
            self.layers.extend(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
            self.load_state_dict(load_file(f"{directory}/model.safetensors"))

    def configure_model(self) -> None:
        if not self.layers:
            self.layers.extend(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

    def training_step(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class UntilTraining(Callback):
    """Samples this process' own memory from now until training starts."""

    def __init__(self) -> None:
        self.before = self.peak = self._now()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._done = threading.Event()
        self._thread.start()

    def on_train_start(self, trainer: Trainer, pl_module: L.LightningModule) -> None:
        self._done.set()
        self._thread.join()
        (parameter, *_) = pl_module.parameters()
        self.shard = parameter.to_local().nbytes if isinstance(parameter, DTensor) else parameter.nbytes

    def _sample(self) -> None:
        while not self._done.wait(0.001):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
        return int(line.split()[1]) * 1024


def peak(rank: int, world: int, directory: str, stream: bool) -> tuple[int, int]:
    # What a training imports stays, and is not of these weights.
    first = L.Trainer(**QUIET, devices=world, strategy=Mesh3DStrategy(zero_stage=3), max_steps=1)
    first.fit(BoringModel())
    memory = UntilTraining()
    chosen = Mesh3DStrategy(zero_stage=3, pretrained=directory if stream else None)
    trainer = L.Trainer(**QUIET, devices=world, strategy=chosen, max_steps=1, callbacks=[memory])
    trainer.fit(Wide(None if stream else directory), DataLoader(torch.ones(8, WIDTH), batch_size=1))
    return memory.peak - memory.before, memory.shard * LAYERS


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts memory as Linux tells it")
def test_no_rank_holds_the_whole(tmp_path: Path) -> None:
    matrix = WIDTH * WIDTH * 4
    save_file({f"layers.{n}.weight": torch.ones(WIDTH, WIDTH) for n in range(LAYERS)}, tmp_path / "model.safetensors")
    margin = 16 * 2**20
    for found, shards in run_spmd(peak, 4, str(tmp_path), True, timeout=60):
        assert shards == LAYERS * matrix // 4
        assert found < shards + matrix + margin, f"{found / 2**20:.0f} MiB"
    for found, _ in run_spmd(peak, 4, str(tmp_path), False, timeout=60):
        # No lower bound: a worker may have memory left from earlier calls, which is not counted.
        assert found < 2 * LAYERS * matrix + margin, f"{found / 2**20:.0f} MiB"
