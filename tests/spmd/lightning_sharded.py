"""A model that Lightning's own sharding strategies train, save as a directory and go on with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed.fsdp.fully_sharded_data_parallel as fsdp_module
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle

from lightning_3d import Mesh3DStrategy
from tests.spmd.fits import QUIET, loader, normal, share

WIDTH, BATCHES = 8, 3


class Body(nn.Module):
    """Two blocks of which one is frozen, a norm, a head and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(2)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1, bias=False)
        self.register_buffer("scale", torch.full((), 0.5))
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x)) * self.scale


class Sharded(L.LightningModule):
    """Two parameter groups in an order of their own, and a scheduler."""

    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Body()

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            mesh = self.device_mesh["data_parallel"]
            for part in (*self.net.blocks, self.net):
                fully_shard(part, mesh=mesh)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        head, *others = [p for p in reversed([*self.parameters()]) if p.requires_grad]
        groups = [{"params": others, "weight_decay": 0.3}, {"params": [head]}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"])
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]


class CpuFSDP(FSDPStrategy):
    """Lightning asks for a GPU by the class alone."""


@contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """Context in which torch's FSDP runs without a GPU."""

    def on_cpu(state: Any, *_: Any) -> Any:
        state._device_handle = _FSDPDeviceHandle.from_device(torch.device("cpu"))
        return state

    with mock.patch.object(fsdp_module, "_init_device_handle", on_cpu), warnings.catch_warnings():
        # torch warns of its own old ways there.
        warnings.simplefilter("ignore")
        yield


def _strategy(name: str) -> Any:
    if name == "fsdp":
        return CpuFSDP(state_dict_type="sharded", auto_wrap_policy={nn.Linear})
    if name == "model parallel":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return "auto"


def sharded(
    rank: int,
    world: int,
    strategy: str | dict[str, Any],
    *,
    epochs: int,
    resume: Path | None = None,
    save: Path | None = None,
) -> dict[str, Any]:
    """Trains so many epochs and returns learning rates and the whole state."""
    L.seed_everything(4, verbose=False)
    with fsdp_on_cpu() if strategy == "fsdp" else nullcontext():
        chosen = Mesh3DStrategy(**strategy) if isinstance(strategy, dict) else _strategy(strategy)
        trainer = L.Trainer(**QUIET, devices=world, strategy=chosen, max_epochs=epochs, use_distributed_sampler=False)
        module = Sharded()
        model = strategy.get("tensor_parallel_size", 1) if isinstance(strategy, dict) else 1
        mine = loader(share(batch, rank // model, world // model) for batch in _batches())
        trainer.fit(module, mine, ckpt_path=resume)
        if save is not None:
            trainer.save_checkpoint(save)
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        state = chosen.full_state_dict() if isinstance(chosen, Mesh3DStrategy) else {}
        if chosen == "auto":
            state = module.state_dict()
        return {"rates": rates, "state": {name: value.clone() for name, value in state.items()}}


def _batches() -> Iterator[Tensor]:
    return (normal(seed, 4, WIDTH, dtype=torch.float32) for seed in range(BATCHES))
