"""The tensor axis through the Trainer, as users use it: loops, hooks, metrics, logs and optimizers as on one device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torchmetrics import CatMetric, MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from tests.parity.models import VOCABULARY, NextToken
from tests.parity.tensor_models import PackedGPT
from tests.spmd.fits import loader, normal
from tests.spmd.tensor_runs import Ranks, Scenario, is_cut, plain, seen_alike, tokens

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(180)]


class Watched(L.LightningModule):
    """Uses its model in steps and hooks in every way, and writes down what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PackedGPT()
        self.metrics = nn.ModuleDict(
            {
                stage: nn.ModuleList([MulticlassAccuracy(VOCABULARY, average="micro"), MeanMetric()])
                for stage in ("train_", "val_", "test_")
            }
        )
        self.seen: dict[str, list[Any]] = {}
        self.expects_shards: bool | None = None

    def note(self, name: str, value: Any) -> None:
        self.seen.setdefault(name, []).append(plain(value) if isinstance(value, Tensor) else value)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)

    def shared(self, stage: str, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self(ids)[:, :-1]
        assert self.expects_shards in (None, is_cut(logits))
        targets = ids[:, 1:]
        each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        both: dict[str, Any] = {"on_step": stage == "train", "on_epoch": True}
        self.log(f"{stage}_loss", each.mean(), sync_dist=True, prog_bar=True, **both)
        self.log_dict({f"{stage}_largest": logits.max(), f"{stage}_spread": logits.logsumexp(-1).mean()}, **both)
        accuracy, mean = self.metrics[f"{stage}_"]
        accuracy(logits.flatten(0, 1), targets.flatten())
        mean.update(logits.gather(-1, targets.unsqueeze(-1)))
        self.log(f"{stage}_accuracy", accuracy, on_step=False, on_epoch=True)
        self.log(f"{stage}_mean", mean, **both)
        guesses = logits.argmax(-1)
        self.note(f"{stage}_guesses", guesses)
        self.note(f"{stage}_top", int(logits.topk(3, dim=-1).indices.sum()))
        return each.mean(), logits

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss, logits = self.shared("train", batch[0])
        return {"loss": loss, "logits": logits, "nested": [logits[:, -1], "text"]}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.note("part", self.model.blocks[0](self.model.tokens(batch[0])))
            self.note("weight", self.model.head(torch.ones(2, 32, dtype=torch.float64)))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("outputs", outputs["logits"])
        self.note("nested", outputs["nested"][0])

    def on_before_backward(self, loss: Tensor) -> None:
        assert not is_cut(self.model.head.weight)

    def on_after_backward(self) -> None:
        gradient = self.model.head.weight.grad
        assert gradient is not None
        self.note("gradient", gradient.norm())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("norm", grad_norm(self, 2)["grad_2.0_norm_total"])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.shared("val", batch[0])[1]

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("val_outputs", outputs)

    def on_validation_epoch_end(self) -> None:
        was = self.training
        self.eval()
        generated = torch.zeros(2, 1, dtype=torch.long)
        for _ in range(3):
            generated = torch.cat([generated, self(generated)[:, -1:].argmax(-1)], dim=1)
        self.note("generated", generated)
        self.train(was)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.shared("test", batch[0])[1]
        # Where the training is planned from another step, these are gathered.
        self.note(
            "picked", [each.sum().item() for each in (logits[..., 3], logits[..., 90:], logits.numpy(force=True))]
        )

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        logits = self(batch[0])
        return {"logits": logits, "best": logits.argmax(-1)}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def metrics(trainer: Trainer) -> dict[str, float]:
    values = {name: plain(value) for name, value in trainer.callback_metrics.items()}
    return {name: value.item() for name, value in values.items()}


def every_loop(ranks: Ranks) -> Any:
    module = Watched()
    module.expects_shards = ranks.cut
    trainer = ranks.trainer(max_epochs=2, gradient_clip_val=0.5, val_check_interval=2)
    trainer.fit(module, loader(tokens(4)), [loader(tokens(2)), loader(tokens(3))])
    found = [metrics(trainer)]
    found.append(trainer.validate(module, loader(tokens(2)), verbose=False))
    found.append(trainer.test(module, loader(tokens(3)), verbose=False))
    found.append(trainer.predict(module, loader(tokens(2))))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader(tokens(3)), loader(tokens(1)))
    found.append(metrics(trainer))
    return found, module.seen


def each_loop_alone(ranks: Ranks) -> Any:
    found: list[Any] = []
    for run in ("validate", "test", "predict"):
        torch.manual_seed(0)
        module = Watched()
        trainer = ranks.trainer()
        found += [getattr(trainer, run)(module, loader(tokens(2))), metrics(trainer), module.seen]
        if run == "validate":
            # A module that was planned for validation trains as well.
            trainer.fit(module, loader(tokens(2)), loader(tokens(1)))
            found += [metrics(trainer), module.seen]
    return found


# ---- optimizers ----


def clipped(algorithm: str) -> Scenario:
    def scenario(ranks: Ranks) -> Any:
        options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
        return ranks.fit(NextToken(PackedGPT()), loader(tokens(3)), **options)

    return scenario


def clipped_by_norm(ranks: Ranks) -> Any:
    return clipped("norm")(ranks)


def clipped_by_value(ranks: Ranks) -> Any:
    return clipped("value")(ranks)


def accumulated(ranks: Ranks) -> Any:
    options: dict[str, Any] = {"accumulate_grad_batches": 4, "strategy": {"num_microbatches": 2}}
    # The last window is short.
    return ranks.fit(NextToken(PackedGPT()), loader(tokens(6)), gradient_clip_val=0.5, **options)


def mlp(inner: int) -> nn.Module:
    return nn.Sequential(nn.Linear(8, inner), nn.GELU(), nn.Linear(inner, 8))


class TwoOptimizers(L.LightningModule):
    """Two networks that train against each other in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = mlp(16), mlp(12)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        first, second = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(first)
        made = self.maker(real.flip(0))
        loss = F.softplus(-self.judge(made)).mean()
        first.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(first, 0.5, "norm")
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        second.zero_grad()
        # Two backward passes for one step.
        self.manual_backward(F.softplus(self.judge(self.maker(real.flip(0)).detach())).mean())
        self.manual_backward(F.softplus(-self.judge(real)).mean())
        norm = nn.utils.clip_grad_norm_(self.judge.parameters(), 0.05)
        self.log("norm", norm)
        second.step()
        self.untoggle_optimizer(second)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.maker, self.judge)]


def two_optimizers(ranks: Ranks) -> Any:
    return ranks.fit(TwoOptimizers(), loader([(normal(seed, 4, 8),) for seed in range(4)]))


class Unfreezes(BaseFinetuning):
    """Blocks train one after the other."""

    def freeze_before_training(self, pl_module: LightningModule) -> None:
        self.freeze(pl_module.model.blocks)

    def finetune_function(self, pl_module: LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch:
            self.unfreeze_and_add_param_group(pl_module.model.blocks[2 - epoch], optimizer, lr=1e-3)


class OfTrained(NextToken):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=self.lr)


def unfrozen_in_between(ranks: Ranks) -> Any:
    return ranks.fit(OfTrained(PackedGPT()), loader(tokens(3)), callbacks=[Unfreezes()], max_epochs=3)


class Averages(Callback):
    """A moving average of the parameters, as many people write it."""

    def __init__(self) -> None:
        self.average: dict[str, Tensor] = {}
        self.whole: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.average = {name: each.detach().clone() for name, each in pl_module.named_parameters()}

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        for name, each in pl_module.named_parameters():
            self.average[name].mul_(0.9).add_(each.detach(), alpha=0.1)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.whole = {name: plain(strategy.full_tensor(name, each)) for name, each in self.average.items()}


def averaged(ranks: Ranks) -> Any:
    averages = Averages()
    record = ranks.fit(NextToken(PackedGPT()), loader(tokens(3)), callbacks=[averages])
    return record, averages.whole


class KeepsMetrics(NextToken):
    """Has metrics in a plain dict and in the module, and gives them logits that are cut."""

    def __init__(self) -> None:
        super().__init__(PackedGPT())
        self.kept = {"called": MeanMetric(), "updated": MeanMetric(), "all": CatMetric()}
        self.inside = MaxMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.logits(batch[0])
        assert is_cut(logits) == (self.trainer.world_size > 1)
        self.kept["called"](logits)
        self.kept["updated"].update(logits.exp(), weight=logits.abs())
        self.kept["all"].update(logits[:, 0])
        self.inside.update(value=logits)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        everything = self.kept["all"].compute()
        assert type(everything) is Tensor
        self.log_dict({name: self.kept[name].compute() for name in ("called", "updated")})
        self.log("inside", self.inside.compute())
        self.log("all", everything.double().square().sum())


def metrics_of_logits(ranks: Ranks) -> Any:
    trainer = ranks.trainer()
    trainer.fit(KeepsMetrics(), loader(tokens(3)))
    return {name: float(value) for name, value in metrics(trainer).items()}


SCENARIOS: tuple[Scenario, ...] = (
    every_loop,
    each_loop_alone,
    clipped_by_norm,
    clipped_by_value,
    accumulated,
    two_optimizers,
    unfrozen_in_between,
    averaged,
    metrics_of_logits,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_as_on_one_device(scenario: Scenario) -> None:
    seen_alike(scenario)
