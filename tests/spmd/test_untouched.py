"""Nothing of torch or Lightning is patched, and Trainers with other strategies do as ever: before, beside and after."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.utils.data import DataLoader

from lightning_3d import Mesh3DStrategy
from tests.features.modules import Module, Samples
from tests.spmd.fits import QUIET
from tests.spmd.pool import run_spmd

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]

_PACKAGES = ("torch", "lightning", "torchmetrics", "lightning_utilities", "lightning_fabric", "pytorch_lightning")
_MESH = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
Place = tuple[str, str]
# Torch has another one there for another default dtype, which precision="64-true" of Lightning sets.
_OF_DTYPE = ("torch", "Storage")


def code_of_others() -> Iterable[tuple[Place, Any]]:
    """Every function and class that stands in a module or a class of torch or Lightning, with its place."""
    with warnings.catch_warnings():
        # Some that are old say so when they are looked at.
        warnings.simplefilter("ignore")
        return list(_code_of_others())


def _code_of_others() -> Iterator[tuple[Place, Any]]:
    classes: dict[type, None] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES:
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__.partition(".")[0] in _PACKAGES:
                    classes[value] = None
                if callable(value):
                    yield (name, key), value
    for cls in classes:
        for key, value in list(vars(cls).items()):
            if callable(value) or hasattr(value, "__get__"):
                yield (f"{cls.__module__}.{cls.__qualname__}", key), value


def ours(value: Any) -> bool:
    """Whether code comes from the library, also where it says that it is what it wraps."""
    inner = getattr(value, "fget", None) or getattr(value, "__func__", value)
    if isinstance(inner, FunctionType):
        return "/lightning_3d/" in inner.__code__.co_filename
    return str(getattr(inner, "__module__", "")).partition(".")[0] == "lightning_3d"


class Watch(Callback):
    """Compares the code of others with what it was before the run, where a patch would be in place."""

    def __init__(self) -> None:
        self.before = dict(code_of_others())
        self.looked = 0
        self.patched: list[Place] = []

    def look(self, *_: Any) -> None:
        self.looked += 1
        for place, value in code_of_others():
            if ours(value) or (place != _OF_DTYPE and self.before.get(place, value) is not value):
                self.patched.append(place)

    on_before_zero_grad = on_after_backward = on_validation_batch_start = on_fit_end = look  # type: ignore[assignment]


class Looking(Module):
    """Looks inside of its step, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (watch,) = (callback for callback in self.trainer.callbacks if isinstance(callback, Watch))
        watch.look()
        return super().training_step(batch, batch_idx)


def fit(strategy: Strategy, devices: int, module: LightningModule, *callbacks: Callback) -> dict[str, Any]:
    trainer = L.Trainer(
        **QUIET, devices=devices, strategy=strategy, precision="64-true", max_epochs=1, callbacks=list(callbacks)
    )
    trainer.fit(module, DataLoader(Samples(8), 4), DataLoader(Samples(4), 4))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def watched(rank: int, world: int) -> tuple[int, list[Place]]:
    watch = Watch()
    fit(Mesh3DStrategy(**_MESH), world, Looking(), watch)
    watch.look()
    return watch.looked, watch.patched


def test_no_code_of_torch_or_lightning_is_replaced_in_training() -> None:
    for looked, patched in run_spmd(watched, 4, timeout=200):
        assert looked > 5
        assert patched == []


def test_a_patch_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    monkeypatch.setattr(torch.Tensor, "backward", lambda *_: None)
    monkeypatch.setattr(Trainer, "validate", property(Trainer.test))
    watch.look()
    assert set(watch.patched) >= {
        ("torch.Tensor", "backward"),
        ("lightning.pytorch.trainer.trainer.Trainer", "validate"),
    }


class Beside(Callback):
    """Trains another module on one device while a run on a mesh goes on."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.seen = single()


def single() -> dict[str, Any]:
    L.seed_everything(2, verbose=False)
    return fit(SingleDeviceStrategy("cpu"), 1, Module())


def with_others(rank: int, world: int) -> None:
    def ddp() -> dict[str, Any]:
        L.seed_everything(3, verbose=False)
        return fit(DDPStrategy(), world, Module())

    first = single(), ddp()
    beside = Beside()
    for strategy in ({"zero_stage": 3}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        fit(Mesh3DStrategy(**strategy), world, Module(), beside)
        assert beside.seen == first[0]
        assert (single(), ddp()) == first


def test_other_strategies_in_the_same_process_do_as_ever() -> None:
    run_spmd(with_others, 2, timeout=200)
