"""Hooks that walk over all parameters of a pipeline: what one device gives, or one kind of error on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_3d import ModuleError
from tests.marks import more
from tests.spmd.pipeline_watched import TWO, samples
from tests.spmd.pool import run_spmd
from tests.spmd.tensor_runs import Ranks, seen_alike
from tests.spmd.toys import WIDTH, Plain

pytestmark = [pytest.mark.spmd, pytest.mark.timeout(240)]


class Acting(Plain):
    """Does something in one of its hooks."""

    def __init__(self, act: Callable[[Any], None], hook: str, orthogonal: bool) -> None:
        super().__init__()
        # Which decomposes the whole weight: not where its rows lie on several data ranks.
        self.orthogonal = orthogonal
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.shadow: dict[str, Tensor] = {}
        self.draws: list[float] = []
        setattr(self, hook, lambda *args: self.called(act))

    @torch.no_grad()
    def called(self, act: Callable[[Any], None]) -> None:
        act(self)
        # Where the generator is.
        self.draws.append(float(torch.rand((), dtype=torch.float64)))

    def gradients(self) -> list[Tensor]:
        """Returns all gradients that there are."""
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]


def initialise(module: Acting) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            if module.orthogonal:
                nn.init.orthogonal_(layer.weight, 0.7)
            else:
                nn.init.kaiming_uniform_(layer.weight)
            nn.init.trunc_normal_(layer.bias, std=0.1)
        elif isinstance(layer, nn.LayerNorm):
            nn.init.normal_(layer.weight, 1.0, 0.1)


def disturb(module: Acting) -> None:
    for gradient in module.gradients():
        gradient.add_(torch.randn_like(gradient), alpha=0.01)


def shrink(module: Acting) -> None:
    for parameter in module.model.parameters():
        parameter.mul_(0.99).div_(torch.clamp(parameter.norm() / 2, min=1.0))
    torch._foreach_mul_([*module.model.parameters()], 0.99)


def rescale(module: Acting) -> None:
    nn.utils.clip_grad_value_(module.parameters(), 0.05)
    for gradient in module.gradients():
        gradient.mul_(1 / (1 + gradient.norm()))


def follow(module: Acting) -> None:
    for average, parameter in zip(module.average.parameters(), module.model.parameters(), strict=True):
        average.lerp_(parameter, 0.1)
    for name, parameter in module.model.named_parameters():
        before = module.shadow.get(name, parameter.detach().clone())
        module.shadow[name] = before.mul_(0.9).add_(parameter.detach(), alpha=0.1)
        parameter.copy_(module.shadow[name])


SERVED = {
    "on_fit_start": (initialise,),
    "on_after_backward": (disturb,),
    "on_before_optimizer_step": (disturb, rescale),
    "on_train_batch_end": (initialise, shrink, follow, disturb),
}


def served(ranks: Ranks, orthogonal: bool) -> Any:
    seen = []
    for hook, acts in SERVED.items():
        for act in acts:
            torch.manual_seed(3)
            module = Acting(act, hook, orthogonal)
            record = ranks.fit(module, samples(12), use_distributed_sampler=False)
            strategy: Any = module.trainer.strategy
            whole = {name: strategy.full_tensor(name, value) for name, value in module.named_parameters()}
            seen.append((hook, act.__name__, module.draws, record, whole))
    return seen


@pytest.mark.parametrize("zero", [0, more(1)])
def test_what_needs_no_values_gives_what_one_device_gives(zero: int) -> None:
    seen_alike(partial(served, orthogonal=not zero), 4 if zero else 2, timeout=200, zero_stage=zero, **TWO)


def there(ranks: Ranks) -> Any:
    seen: list[Any] = []

    class Counting(Plain):
        def count(self, hook: str) -> None:
            seen.append((hook, sum(parameter.grad is not None for parameter in self.parameters())))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.count("start")

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.count("zero")

        def on_before_backward(self, loss: Tensor) -> None:
            self.count("before")

        def on_after_backward(self) -> None:
            self.count("after")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.count("step")
            whole: Any = self.trainer.strategy
            gradients = [whole.full_tensor(name, each.grad) for name, each in self.named_parameters()]
            seen.append(torch.stack([gradient.norm() for gradient in gradients]).norm())

    ranks.fit(Counting(), samples(12))
    ranks.fit(Counting(), samples(16), accumulate_grad_batches=2)
    # A batch that only accumulates has its gradients wait, on a pipeline.
    return [each for each in seen if isinstance(each, Tensor) or each[0] == "step"], len(seen)


def test_gradients_are_there_where_one_device_has_them() -> None:
    seen_alike(there, zero_stage=0, **TWO)


def clip_all(module: Acting) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.05)


def log_norms(module: Acting) -> None:
    module.log_dict(cast("dict[str, Any]", grad_norm(module, 2)))


def log_total(module: Acting) -> None:
    module.log("total", torch.stack([gradient.norm() for gradient in module.gradients()]).norm())


def add_numbers(module: Acting) -> None:
    sum(gradient.norm().item() for gradient in module.gradients())


def skip_if_infinite(module: Acting) -> None:
    if not all(torch.isfinite(gradient).all() for gradient in module.gradients()):
        module.zero_grad()


def mix(module: Acting) -> None:
    blocks: Any = module.model.blocks
    for one, other in zip(blocks[0].parameters(), blocks[3].parameters(), strict=True):
        mean = (one + other) / 2
        torch.zeros_like(mean).add_(mean)
        module.draws.append(float(mean.sum()))


def look(module: Acting) -> None:
    module.draws.append(sum(float(parameter.max()) for parameter in module.parameters()))


def compare(module: Acting) -> None:
    blocks: Any = module.model.blocks
    module.draws += [float(torch.equal(*(block.linear.weight for block in (blocks[0], other)))) for other in blocks]
    blocks[3].linear.bias.copy_(blocks[0].linear.bias)
    torch._foreach_add_(
        [blocks[0].linear.bias, blocks[3].linear.bias], [blocks[3].linear.bias.clone(), blocks[0].linear.bias.clone()]
    )
    module.draws.append(float(torch.cat([each.flatten() for each in module.parameters()]).std()))


def drop(module: Acting) -> None:
    for name, parameter in module.named_parameters():
        if parameter.grad is not None and parameter.grad.norm() < 0.1 and "bias" in name:
            parameter.grad = None
    module.draws.append(sum(parameter.grad is None for parameter in module.parameters()))


def call(module: Acting) -> None:
    # Inside, the ranks do different things.
    inputs = torch.ones(2, WIDTH, dtype=torch.float64)
    module.draws.append(float(module.model(inputs).sum() + module.model.blocks[3].linear.weight.norm()))


def copies(module: Acting) -> None:
    late = copy.deepcopy(module.model)
    for each in (module.average, late):
        module.draws.append(sum(float(parameter.norm()) for parameter in each.parameters()))
    own = [nn.Parameter(parameter.detach().clone()) for parameter in module.model.parameters()]
    module.draws.append(float(sum(parameter.norm() for parameter in own)))


READING = (clip_all, log_norms, log_total, add_numbers, skip_if_infinite, mix, look, compare, drop, call, copies)


def read(ranks: Ranks) -> Any:
    seen = []
    for act in READING:
        torch.manual_seed(3)
        module = Acting(act, "on_before_optimizer_step", orthogonal=False)
        record = ranks.fit(module, samples(12), use_distributed_sampler=False)
        strategy: Any = module.trainer.strategy
        whole = {name: strategy.full_tensor(name, value) for name, value in module.named_parameters()}
        seen.append((act.__name__, module.draws, record, whole, metrics(module)))
    return seen


def metrics(module: Plain) -> dict[str, float]:
    """Returns what was logged."""
    return {name: float(value) for name, value in module.trainer.callback_metrics.items()}


@pytest.mark.parametrize("zero", [0, more(1)])
def test_numbers_come_from_the_ranks_that_have_them(zero: int) -> None:
    seen_alike(read, 4 if zero else 2, timeout=200, zero_stage=zero, **TWO)


class Outside(Plain):
    """Reads where no hook of Lightning's is: nobody else may be there."""

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        optimizer.register_step_pre_hook(lambda *_: sum(float(each.detach().norm()) for each in self.parameters()))
        return optimizer


class Writes(Plain):
    """Makes an array of a whole parameter, as loggers do on one rank alone."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.detach().numpy()


def refused(rank: int, world: int, kind: type[Plain]) -> str:
    ranks = Ranks(world=world, strategy=TWO)
    with pytest.raises(ModuleError) as error:
        ranks.fit(kind(), samples(4))
    return str(error.value)


@pytest.mark.parametrize("kind", [Outside, Writes], ids=lambda each: each.__name__)
def test_what_needs_values_elsewhere_is_refused_on_every_rank(kind: type[Plain]) -> None:
    for rank, message in enumerate(run_spmd(refused, 2, kind, timeout=60)):
        assert f"it lies on pipeline rank {1 - rank}, and this is rank {rank}" in message
        assert "strategy.full_tensor(" in message


class Strays(Plain):
    """Reads on one rank only."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        parameters = list(self.parameters())
        place = 0 if self.trainer.is_global_zero else -1
        float(parameters[place].detach().norm())


def strays(rank: int, world: int) -> str:
    with pytest.raises(ModuleError) as error:
        Ranks(world=world, strategy=TWO).fit(Strays(), samples(4))
    return str(error.value)


def test_ranks_at_different_places_of_a_hook_are_told() -> None:
    assert all("at different places of a hook" in message for message in run_spmd(strays, 2, timeout=60))


def clipped(ranks: Ranks) -> Any:
    class Clipping(Plain):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **options: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")

    return ranks.fit(Clipping(), samples(12))


def test_the_way_out_of_clipping() -> None:
    seen_alike(clipped, **TWO)
