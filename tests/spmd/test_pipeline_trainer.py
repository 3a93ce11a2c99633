"""The pipeline axis through the Trainer, as users use it: every rank sees what one device sees."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor

from tests.spmd.pipeline_watched import TWO, Watched, samples, values, weights
from tests.spmd.tensor_runs import Ranks, seen_alike
from tests.spmd.toys import CLASSES

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]


class Hooks(Callback):
    """Writes down every hook, its own and the module's, in order."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def watch(self, module: LightningModule) -> None:
        for owner, prefix in ((self, "callback"), (module, "module")):
            for name in dir(type(owner)):
                if name.startswith("on_") or name in ("setup", "teardown", "optimizer_step", "optimizer_zero_grad"):
                    self._watch(owner, name, f"{prefix} {name}")

    def _watch(self, owner: Any, name: str, shown: str) -> None:
        method = getattr(owner, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            self.order.append(shown)
            return method(*args, **kwargs)

        owner.__dict__[name] = called


# ---- everything at once ----


def every_loop(ranks: Ranks) -> Any:
    module = Watched()
    trainer = ranks.trainer(
        max_epochs=2, gradient_clip_val=0.5, accumulate_grad_batches=2, strategy={"num_microbatches": 2}
    )
    # The last batch has 3 samples, in micro-batches of 2 and 1; the last window is short.
    trainer.fit(module, samples(19), samples(7))
    found = [values(trainer), weights(trainer)]
    found.append(trainer.validate(module, samples(7), verbose=False))
    found.append(trainer.test(module, samples(9), verbose=False))
    found.append(trainer.predict(module, samples(6)))
    return found, module.seen


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b", "zbvzerobubble"])
def test_every_loop_and_hook_sees_what_one_device_sees(schedule: str) -> None:
    found, seen = seen_alike(every_loop, **TWO, pipeline_schedule=schedule)
    assert len(seen["outputs"]) == 10
    assert {"loss_step", "accuracy_epoch", "counted_epoch", "epoch_f1", "val_accuracy", "val_mean"} <= set(found[0])


def hooks_in_order(ranks: Ranks) -> list[str]:
    module, hooks = Watched(), Hooks()
    hooks.watch(module)
    trainer = ranks.trainer(hooks, max_epochs=2, accumulate_grad_batches=2, strategy={"num_microbatches": 2})
    trainer.fit(module, samples(10), samples(4))
    # Before, a plan is made from the first batch.
    return hooks.order[hooks.order.index("callback on_fit_start") :]


def test_hooks_run_in_one_devices_order_on_every_rank() -> None:
    order = seen_alike(hooks_in_order, **TWO)
    assert order.count("module on_after_backward") == 6
    assert order.count("module on_before_optimizer_step") == 4


# ---- decisions ----


class Decides(Watched):
    """A monitored value that gets better, and then worse."""

    def on_validation_epoch_end(self) -> None:
        self.log("chosen", self.val_mean.compute() * 0 + [3.0, 1.0, 2.0, 2.5, 4.0][self.current_epoch])


def decided(ranks: Ranks) -> Any:
    with tempfile.TemporaryDirectory() as alone:
        strategy: Any = {"num_microbatches": 2}
        keeper = ModelCheckpoint(monitor="chosen", filename="{epoch}-{chosen:.2f}", save_top_k=2)
        stopper = EarlyStopping("chosen", patience=2)
        trainer = ranks.trainer(
            keeper,
            stopper,
            max_epochs=9,
            enable_checkpointing=True,
            default_root_dir=alone,
            strategy=strategy,
            num_sanity_val_steps=0,
        )
        module = Decides()
        trainer.fit(module, samples(8), samples(5))
        best = Path(keeper.best_model_path).name
        return stopper.stopped_epoch, best, float(keeper.best_model_score or 0), trainer.global_step, values(trainer)


def test_checkpoints_and_ends_are_those_of_one_device() -> None:
    stopped, best, score, steps, _ = seen_alike(decided, **TWO)
    assert (stopped, score, steps) == (3, 1.0, 8)
    assert best.startswith("epoch=1-chosen=1.00")


# ---- weights of losses ----


class Weighted(Watched):
    """Some samples do not count."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        inputs, targets = batch
        each = F.cross_entropy(self(inputs), targets, reduction="none")
        counts = (inputs[:, 0] > 0).double() + 0.25
        loss = (each * counts).sum() / counts.sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "loss_weight": counts.sum(), "logits": torch.zeros(len(targets), CLASSES)} | SEEN

    def on_train_epoch_end(self) -> None:
        self.note("end", self.current_epoch)


SEEN: dict[str, Any] = {"spread": torch.tensor(0.0), "text": "here"}


def weighted(ranks: Ranks) -> Any:
    module = Weighted()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    trainer = ranks.trainer(max_epochs=2, strategy={"num_microbatches": 3}, **options)
    trainer.fit(module, samples(19), samples(4))
    return module.seen, values(trainer), weights(trainer)


def test_weighted_losses_are_one_mean() -> None:
    seen_alike(weighted, **TWO)


# ---- evaluation that no schedule can run ----


class Reads(Watched):
    """Looks at a hidden state between the blocks, in validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = batch[0]
        for block in self.model.blocks:
            hidden = block(hidden)
            if hidden.abs().max().item() > 1e6:
                raise OverflowError
        logits: Tensor = self.model.head(hidden)
        self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)
        self.val_accuracy(logits, batch[1])
        self.log("val_accuracy", self.val_accuracy)
        self.val_mean.update(logits)
        return logits


def reads(ranks: Ranks) -> Any:
    module = Reads()
    trainer = ranks.trainer(strategy={"num_microbatches": 2})
    trainer.fit(module, samples(8), samples(7))
    found = values(trainer)
    # Its states are fp32, and have seen the samples of a batch together.
    assert math.isclose(found.pop("val_mean"), -0.1703974, rel_tol=1e-6)
    return found, module.seen


def test_a_validation_that_reads_hidden_states_runs_on_all_stages_together() -> None:
    seen_alike(reads, **TWO)


# ---- several data ranks, and ends that are not even ----


def uneven(ranks: Ranks) -> Any:
    module = Watched()
    data = 2 if ranks.cut else 1
    strategy = {"num_microbatches": 4 // data}
    trainer = ranks.trainer(strategy=strategy, max_epochs=2, use_distributed_sampler=ranks.cut)
    # 7 samples are 4 on one data rank and 3 on the other, 2 + 2 and 2 + 1; 3 are 1 + 1 and 1.
    return [trainer.validate(module, samples(count, size=8 // data), verbose=False) for count in (7, 3)]


@pytest.mark.filterwarnings("ignore:Using `DistributedSampler`")
def test_uneven_validation_on_two_data_ranks() -> None:
    found = seen_alike(uneven, 4, **TWO, zero_stage=3)
    assert all({"val_loss", "val_accuracy", "val_mean"} <= set(each[0]) for each in found)
