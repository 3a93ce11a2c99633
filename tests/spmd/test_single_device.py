"""One device: the strategy with all degrees 1 against Lightning's own, bit for bit and hook for hook."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from torch import Tensor
from torch.nn import functional as F

from lightning_3d import Mesh3DStrategy
from tests.parity.catalog import global_batches
from tests.parity.measure import whole
from tests.parity.models import VOCABULARY, NextToken
from tests.spmd.fits import loader, normal, trainer
from tests.spmd.pool import run_spmd

pytestmark = pytest.mark.spmd

PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed")


class Boring(BoringModel):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = super().training_step(batch, batch_idx)
        self.log("train_loss", output["loss"])
        return output


class ManualBoring(ManualOptimBoringModel):
    """Lightning's demo of manual optimization."""


class Demo(L.LightningModule):
    """Lightning's demo Transformer, dropout included."""

    def __init__(self) -> None:
        super().__init__()
        from lightning.pytorch.demos.transformer import Transformer

        self.model = Transformer(vocab_size=50, ninp=16, nhid=16)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, target = batch
        loss = F.nll_loss(self.model(inputs, target), target.view(-1))
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)


def gpt2() -> LightningModule:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=12, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return NextToken(GPT2LMHeadModel(config))


def boring_batches() -> list[Any]:
    return [normal(index, 4, 32, dtype=torch.float32) for index in range(5)]


def token_batches() -> list[Any]:
    return global_batches("HF GPT-2 (tied)", 5, 4)


def pair_batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 50, (2, 3, 6), generator=generator).unbind() for _ in range(5)]


MODULES: dict[str, Any] = {
    "boring": (Boring, boring_batches),
    "manual": (ManualBoring, boring_batches),
    "gpt2": (gpt2, token_batches),
    "demo": (Demo, pair_batches),
}


class Trace(Callback):
    """Everything that a step leaves: losses, gradients before the step, and weights after it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Strategies of several devices seed again at the start, Lightning's for one does not.
        torch.manual_seed(0)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.seen.append(whole({n: p.grad for n, p in pl_module.named_parameters() if p.grad is not None}))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        metrics = {name: value for name, value in trainer.callback_metrics.items() if name != "val_loss"}
        self.seen.append(whole(metrics))
        self.seen.append(whole(dict(pl_module.named_parameters())))
        self.seen.append(outputs)


def trained(name: str, strategy: Any, **options: Any) -> list[Any]:
    make, batches = MODULES[name]
    L.seed_everything(7, verbose=False)
    trace = Trace()
    run = trainer(1, trace, strategy=strategy, max_epochs=2, **options)
    run.fit(make(), loader(batches()), loader(batches()[:2]) if name == "boring" else None)
    return trace.seen


def both(rank: int, world: int, name: str, precisions: tuple[str, ...], options: dict[str, Any]) -> list[Any]:
    """Returns what both strategies left, for each precision."""
    found = []
    for precision in precisions:
        # The demo draws: with torch's own generator it must draw the same.
        ours = Mesh3DStrategy(layout_free_random=name != "demo")
        found.append([trained(name, strategy, precision=precision, **options) for strategy in (ours, "auto")])
    return found


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "manual"])
def test_equals_lightning_bit_for_bit(name: str) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    for precision, (ours, lightning) in zip(
        PRECISIONS, run_spmd(both, 1, name, PRECISIONS, options, timeout=90)[0], strict=True
    ):
        assert len(ours) > 10
        assert same(ours, lightning), precision


def test_other_clipping_and_manual_optimization_equal_lightning() -> None:
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    for name, options in (("boring", by_value), ("manual", {})):
        for ours, lightning in run_spmd(both, 1, name, ("32-true",), options)[0]:
            assert same(ours, lightning), name


_STEPS = ("training_step", "backward", "validation_step")
_NAMES = sorted(
    {
        name
        for owner in (ModelHooks, DataHooks, CheckpointHooks, Callback)
        for name in vars(owner)
        if not name.startswith("_") and not name.endswith("dataloader") and name != "state_key"
    }
    | {"optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"}
    | {"configure_callbacks", "configure_optimizers", *_STEPS}
)


def tracing(base: type[Any], calls: list[str]) -> type[Any]:
    """A class that writes down every hook that is called."""

    def traced(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{base.__name__}.{name}")
            return getattr(super(cls, self), name)(*args, **kwargs)

        return hook

    # Lightning asks only whether the hooks below are overridden, and then treats the module otherwise.
    skipped = ("configure_model", "configure_sharded_model")
    names = [name for name in _NAMES if hasattr(base, name) and name not in skipped]
    cls = type(f"Traced{base.__name__}", (base,), {name: traced(name) for name in names})
    return cls


def hooks(rank: int, world: int) -> list[list[str]]:
    """Returns the hooks of three runs: Lightning's, ours, and ours with three micro-batches."""
    found = []
    for strategy in ("auto", Mesh3DStrategy(), Mesh3DStrategy(num_microbatches=3)):
        calls: list[str] = []
        module, callback = tracing(Boring, calls)(), tracing(Callback, calls)()
        run = trainer(1, callback, strategy=strategy, max_epochs=2, accumulate_grad_batches=2, gradient_clip_val=1.0)
        run.fit(module, loader(boring_batches()), loader(boring_batches()[:2]))
        run.test(module, loader(boring_batches()[:1]), verbose=False)
        found.append(calls)
    return found


def test_hooks_fire_in_lightnings_order_and_as_often() -> None:
    lightning, ours, microbatches = run_spmd(hooks, 1)[0]
    assert len(lightning) > 200
    assert ours == lightning
    inner = tuple(f"Boring.{name}" for name in (*_STEPS, "test_step"))
    assert [call for call in microbatches if call not in inner] == [call for call in lightning if call not in inner]
    for name in inner[:2]:
        assert microbatches.count(name) == 3 * lightning.count(name) == 30, name
