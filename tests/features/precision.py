"""Features: precision."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.func import functional_call

from lightning_3d import Mesh3DPrecision
from tests.features.here import CUBE, Here
from tests.features.modules import WIDTH, Data, Module, Samples, metrics, weights
from tests.features.table import Feature, Seen

# A step in 16 bits computes numbers that are off by some of their last bits, and by others where a batch is cut
# otherwise. What is compared are the updates of the weights, to the largest of each tensor.
_BFLOAT, _HALF, _SINGLE = 3e-2, 1e-2, 1e-4
# Weights in 16 bits round each update to their own last bit, a twentieth of the largest updates here: all updates are
# compared to the largest of the module.
_ROUNDED = 1e-1


class Single(Data):
    """The same batches in fp32, as datasets are."""

    def train_dataloader(self) -> Any:
        return self.here.loader(_single(Samples(self.samples)), self.batch_size)

    def val_dataloader(self) -> Any:
        return self.here.loader(_single(Samples(self.samples // 2, seed=1)), self.batch_size)


class Descends(Module):
    """Trains by plain steps, which are as exact as the gradients are: AdamW's are not where a gradient is near 0."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Looks(Descends):
    """Notes which dtypes its step, its hooks and its optimizer see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Any] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen["batch"] = [value.dtype for value in batch]

    def loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        scores = self(inputs)
        self.seen["step"] = [inputs.dtype, targets.dtype]
        return F.cross_entropy(scores, targets)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen["gradients"] = {parameter.grad.dtype for parameter in self.parameters() if parameter.grad is not None}


class Master(Descends):
    """On one device what bf16-master is: fp32 weights, computed with in bf16.

    Args:
        by_hand: Casts, for a Trainer that does not.
    """

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.by_hand:
            return self.net(inputs)
        low = {name: parameter.bfloat16() for name, parameter in self.net.named_parameters()}
        scores: Tensor = functional_call(self.net, low, (inputs.bfloat16(),))
        return scores


class Normalised(Descends):
    """Has running statistics in fp32 beside layers that compute in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(self.norm(inputs))


def _single(samples: Samples) -> Samples:
    samples.inputs = samples.inputs.float()
    return samples


def _trained(here: Here, module: Module, **options: Any) -> dict[str, Any]:
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    trainer = here.trainer(**options)
    trainer.fit(module, Single(here))
    after = weights(trainer)
    return {
        "updates": {name: after[name] - before[name].to(after[name].dtype) for name in before},
        "metrics": metrics(trainer),
    }


def trained_in(precision: str, here: Here) -> Seen:
    module = Looks()
    seen = _trained(here, module, precision=precision)
    return seen | {"dtypes": module.seen}


def trained_in_16_bits(here: Here) -> Seen:
    module = Looks()
    seen = _trained(here, module, precision="bf16-true")
    updates = torch.cat([update.flatten() for update in seen["updates"].values()])
    return seen | {"updates": updates, "dtypes": module.seen}


def mixed_16(here: Here) -> Seen:
    module = Looks()
    plugin: Any = MixedPrecision("16-mixed", "cpu") if here.mesh.strategy is None else Mesh3DPrecision("16-mixed")
    seen = _trained(here, module, precision=None, plugins=plugin)
    return seen | {"dtypes": module.seen, "scale": float(plugin.scaler.get_scale())}


def bf16_master(here: Here) -> Seen:
    by_hand = here.mesh.strategy is None
    plugins = None if by_hand else Mesh3DPrecision("bf16-master")
    return _trained(here, Master(by_hand), precision="32-true" if by_hand else None, plugins=plugins)


def buffers_stay_wide(here: Here) -> Seen:
    trainer = here.trainer(precision="bf16-mixed")
    trainer.fit(Normalised(), Single(here))
    state = weights(trainer)
    norm = {name: value for name, value in state.items() if name.startswith("norm.")}
    moved = {name: bool((value != 0).any()) for name, value in norm.items()}
    return {"dtypes": {name: value.dtype for name, value in norm.items()}, "moved": moved, "steps": trainer.global_step}


FEATURES: tuple[Feature, ...] = (
    Feature(name='precision="64-true"', program=partial(trained_in, "64-true"), always=(CUBE,)),
    Feature(name='precision="32-true"', program=partial(trained_in, "32-true"), close=_SINGLE),
    Feature(name='precision="bf16-mixed"', program=partial(trained_in, "bf16-mixed"), close=_BFLOAT, always=(CUBE,)),
    Feature(name='precision="bf16-true"', program=trained_in_16_bits, close=_ROUNDED),
    Feature(name='plugins=Mesh3DPrecision("16-mixed")', program=mixed_16, close=_HALF),
    Feature(name='plugins=Mesh3DPrecision("bf16-master")', program=bf16_master, close=_BFLOAT),
    Feature(name="buffers stay fp32 under bf16-mixed", program=buffers_stay_wide, options={"num_microbatches": 1}),
)
