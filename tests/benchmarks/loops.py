"""The loops that take turns in the benchmarks: a small GPT under Trainers and in loops written by hand."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_3d.reference.gpt import GPT
from tests.benchmarks.paired import Side
from tests.spmd.lightning_sharded import fsdp_on_cpu

Loop = Callable[[Side], None]
VOCABULARY, CLIP, RATE = 256, 1.0, 1e-3


@dataclass(frozen=True)
class Size:
    """How large the model and a rank's batch are."""

    width: int = 192
    layers: int = 4
    heads: int = 6
    length: int = 128
    samples: int = 8

    def model(self) -> GPT:
        """Builds the model, the same on every rank."""
        torch.manual_seed(0)
        return GPT(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            num_layers=self.layers,
            num_heads=self.heads,
            max_length=self.length,
        )

    def batches(self, rank: int, count: int) -> list[Tensor]:
        """Returns batches of token ids of one data rank."""
        generator = torch.Generator().manual_seed(rank)
        shape = (self.samples, self.length)
        return [torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(count)]


class Model(L.LightningModule):
    """The model in a plain LightningModule; Lightning's ModelParallelStrategy needs its plan written here."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = size.model()

    def configure_model(self) -> None:
        """What a user of ModelParallelStrategy writes by hand: units of FSDP2."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            assert self.device_mesh is not None
            shard(self.model, self.device_mesh["data_parallel"])

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.model, ids)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=RATE)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Next-token cross-entropy."""
    return cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def shard(model: GPT, mesh: Any) -> None:
    """Makes the blocks and the rest units of FSDP2, as torch's documentation shows."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def trainer_loop(strategy: Strategy, rank: int, world: int, size: Size, *, clip: float | None = CLIP) -> Loop:
    """Returns a loop that is a Trainer with some strategy; ``rank`` is the data rank."""

    def loop(side: Side) -> None:
        with fsdp_on_cpu() if isinstance(strategy, FSDPStrategy) else nullcontext():
            trainer = trainer_of(strategy, world, [side.callback()], clip=clip)
            trainer.fit(Model(size), loader(size.batches(rank, side.turns.steps)))

    return loop


def trainer_of(strategy: Strategy, world: int, callbacks: list[L.Callback], *, clip: float | None = CLIP) -> L.Trainer:
    """Returns a quiet Trainer on all ranks."""
    return L.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=clip,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )


def loader(batches: list[Tensor]) -> DataLoader[Tensor]:
    """Returns a loader of ready batches."""
    ready: Any = batches
    return DataLoader(ready, batch_size=None)


def hand_loop(wrap: Callable[[GPT], nn.Module], rank: int, size: Size) -> Loop:
    """Returns a loop of a few lines around a model that ``wrap`` has prepared."""

    def loop(side: Side) -> None:
        model = wrap(size.model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
        for ids in size.batches(rank, side.turns.steps):
            loss_of(model, ids).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad()
            side.step_ended()

    return loop


def fsdp2(world: int) -> Callable[[GPT], nn.Module]:
    """Returns what wraps a model by hand in torch's fully_shard."""

    def wrap(model: GPT) -> nn.Module:
        shard(model, init_device_mesh("cpu", (world,)))
        return model

    return wrap


def ddp(model: GPT) -> nn.Module:
    """Wraps a model by hand in torch's DistributedDataParallel."""
    return DistributedDataParallel(model)


def deepspeed_loop(stage: int, rank: int, size: Size) -> Loop:
    """Returns a loop around DeepSpeed's own engine; Lightning's DeepSpeedStrategy asks for a GPU."""

    def loop(side: Side) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import deepspeed  # type: ignore[import-not-found]

            deepspeed.logger.setLevel("ERROR")
            # It keeps the process groups of an earlier run.
            importlib.reload(deepspeed.utils.groups)
            deepspeed.comm.comm.cdb = None
            model = size.model()
            engine, *_ = deepspeed.initialize(
                model=model,
                optimizer=torch.optim.AdamW(model.parameters(), lr=RATE),
                dist_init_required=False,
                config={
                    "train_micro_batch_size_per_gpu": size.samples,
                    "gradient_clipping": CLIP,
                    "zero_optimization": {"stage": stage},
                    "zero_allow_untested_optimizer": True,
                    "zero_force_ds_cpu_optimizer": False,
                },
            )
            for ids in size.batches(rank, side.turns.steps):
                engine.backward(loss_of(engine, ids))
                engine.step()
                side.step_ended()

    return loop


def has_deepspeed() -> bool:
    """Whether DeepSpeed is installed."""
    return find_spec("deepspeed") is not None
