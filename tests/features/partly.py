"""Programs of features: modules of which some parts train, or train later."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tests.features.fitting import Configured, Rates, fitted
from tests.features.here import Here
from tests.features.modules import CLASSES, Classifies, Data, Module, metrics, weights
from tests.features.table import Seen


class Frozen(Module):
    """The first layer and two blocks are frozen; the optimizer has the rest only."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.net.first, self.net.blocks[0], self.net.blocks[3].up):
            part.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return AdamW((value for value in self.parameters() if value.requires_grad), lr=self.lr)


def frozen(here: Here) -> Seen:
    return fitted(here, Frozen(), gradient_clip_val=0.1)


class Adapter(nn.Module):
    """A frozen linear layer and a product of two narrow matrices beside it, as LoRA has."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        adapted: Tensor = self.base(inputs) + F.linear(F.linear(inputs, self.down), self.up)
        return adapted


class Adapted(Module):
    """Only adapters in the blocks train."""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)
        for block in self.net.blocks:
            block.up, block.down = Adapter(block.up), Adapter(block.down)

    def configure_optimizers(self) -> Any:
        return SGD([value for value in self.parameters() if value.requires_grad], lr=0.05, momentum=0.9)


def adapters(here: Here) -> Seen:
    first = here.trainer()
    first.fit(Adapted().double(), Data(here))
    path = here.directory / "adapted.ckpt"
    first.save_checkpoint(path)
    rates = Rates()
    trainer = here.trainer(rates, max_epochs=2)
    # Lightning loads before it converts, and fp32 would round what it loads.
    module = Adapted().double()
    trainer.fit(module, Data(here), ckpt_path=path)
    training = sum(value.requires_grad for value in module.parameters())
    return {
        "metrics": metrics(trainer),
        "weights": weights(trainer),
        "steps": trainer.global_step,
        "training": training,
    }


class Unfreezes(BaseFinetuning):
    """Trains the head alone at first, and one more block each epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.first, pl_module.net.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        if epoch:
            block = pl_module.net.blocks[4 - epoch]
            self.unfreeze_and_add_param_group(block, optimizer, initial_denom_lr=5)


def head_first(module: Module) -> Any:
    return AdamW([value for value in module.parameters() if value.requires_grad], lr=module.lr)


def finetuning(here: Here) -> Seen:
    return fitted(here, Configured(head_first), Unfreezes(), max_epochs=3)


class HasBackbone(Module):
    """Has a part that is called ``backbone``, as `BackboneFinetuning` wants."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Classifies(), nn.Linear(CLASSES, CLASSES)
        del self.net

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(self.backbone(inputs))
        return scores

    def configure_optimizers(self) -> Any:
        return Adam([value for value in self.parameters() if value.requires_grad], lr=self.lr)


def backbone(here: Here) -> Seen:
    callback = BackboneFinetuning(unfreeze_backbone_at_epoch=1, lambda_func=lambda epoch: 1.5, verbose=False)
    return fitted(here, HasBackbone(), callback, max_epochs=3)
