"""Whose gradients can be summed later, and what the finished plan then communicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.fake_run import fake_run
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.parallel.tensor.trace.exchanges import Collectives
from lightning_3d.parallel.tensor.trace.rehearsal import Rehearsal
from tests.parity.catalog import build, global_batches
from tests.unit.parallel.tensor.experts import Around, Mixture
from tests.unit.parallel.tensor.planned import Pair, plan, small_plan

WIDTH, HEAD = 32, 8
KEYS = {"model.tested.keys.weight", "model.tested.values.weight"}

Change = Callable[[Tensor, Tensor], Tensor]


class MultiQuery(nn.Module):
    """Four heads of queries that share one head of keys and values.

    Args:
        change: Makes other keys of the keys and of the input.
        view: The input of keys and values.
    """

    def __init__(self, change: Change, view: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.queries, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.keys, self.values = nn.Linear(WIDTH, HEAD, bias=False), nn.Linear(WIDTH, HEAD, bias=False)
        self.norm, self.scale = nn.LayerNorm(HEAD), nn.Parameter(torch.ones(HEAD))
        self.change, self.view = change, view
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries(x).unflatten(-1, (4, HEAD)).transpose(1, 2)
        y = self.view(x)
        keys = self.change(self.keys(y), y)
        mixed = F.scaled_dot_product_attention(queries, keys[:, None], self.values(y)[:, None], is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


class After(nn.Module):
    """What is tested, after something that wants gradients, and before something that uses what it keeps."""

    def __init__(self, tested: nn.Module, uses: bool = False) -> None:
        super().__init__()
        self.before, self.tested, self.uses = Pair(F.gelu), tested, uses

    def forward(self, x: Tensor) -> Tensor:
        y = self.tested(self.before(x))
        return y + self.tested.kept.mean() if self.uses else y


def with_norm(attention: MultiQuery) -> MultiQuery:
    attention.change = lambda keys, _: attention.norm(keys.clone()) * (1 + attention.scale.float()).to(keys.dtype)
    return attention


def frozen(attention: MultiQuery) -> MultiQuery:
    attention.keys.requires_grad_(False)
    return attention


def same(keys: Tensor, _: Tensor) -> Tensor:
    return keys


def keeping(attention: MultiQuery) -> MultiQuery:
    attention.change = lambda keys, _: setattr(attention, "kept", keys) or keys
    return attention


@pytest.mark.parametrize(
    ("attention", "more"),
    [
        (MultiQuery(same), set()),
        (with_norm(MultiQuery(same)), {"norm.weight", "norm.bias", "scale"}),
        (MultiQuery(lambda keys, _: keys.mul_(2).float().contiguous()), set()),
        (MultiQuery(lambda keys, x: keys + x[..., :HEAD].detach()), set()),
        (frozen(MultiQuery(same)), set()),
        (keeping(MultiQuery(same)), set()),
    ],
    ids=["plain", "norm", "in place", "beside what wants no gradient", "frozen", "kept and not used"],
)
def test_keys_share_the_sum_of_the_queries(attention: MultiQuery, more: set[str]) -> None:
    found = small_plan(After(attention))
    assert found.partial == KEYS | {f"model.tested.{name}" for name in more}
    # The pair and the attention.
    assert found.traffic[""] == Collectives(forward=2, backward=1)


def set_first(keys: Tensor, x: Tensor) -> Tensor:
    keys[:, 0] = x[:, 0, :HEAD]
    return keys


def written(keys: Tensor, x: Tensor) -> Tensor:
    return x[..., :HEAD].clone().add_(keys)


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@pytest.mark.parametrize(
    "change", [set_first, written, lambda keys, x: keys * x[..., :HEAD], lambda k, _: Passed.apply(k)]
)
def test_keys_of_which_nobody_knows_are_summed_themselves(change: Change) -> None:
    found = small_plan(After(MultiQuery(change)))
    assert found.partial == {"model.tested.values.weight"}
    assert found.traffic[""] == Collectives(forward=2, backward=2)


def test_what_is_used_elsewhere_is_summed_where_it_meets_shards() -> None:
    found = small_plan(After(keeping(MultiQuery(same)), uses=True))
    assert found.partial == {"model.tested.values.weight"}


def test_a_view_of_its_own_is_not_summed_instead() -> None:
    found = small_plan(After(MultiQuery(same, view=lambda x: x.reshape(x.shape))))
    assert found.partial == frozenset()


class Sequences(nn.Module):
    """Tables of kinds of different sizes, and a pair of weights."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(rows, WIDTH), nn.Embedding(6, WIDTH)
        self.pair, self.norm = Pair(F.gelu), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.pair(self.table(ids) + self.places(torch.arange(ids.shape[1]))))


@pytest.mark.parametrize(("rows", "small"), [(7, True), (97, False)])
def test_gradients_of_vocabularies_are_not_summed_with_others(rows: int, small: bool) -> None:
    ids = torch.zeros(2, 6, dtype=torch.long)
    found = small_plan(Sequences(rows), batch=ids, sequence=True)
    tables = {"model.table.weight", "model.places.weight"} if small else set()
    rest = {"model.norm.weight", "model.norm.bias", "model.pair.down.bias"}
    assert found.partial == rest | tables


class Front(L.LightningModule):
    """A replicated front whose only use is a small head that is cut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.front = nn.Conv1d(1, channels, 5)
        self.mix, self.pair = nn.Conv1d(channels, WIDTH, 5), Pair(F.gelu)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.mix(self.front(batch)).mean(-1)
        return self.pair.down(F.gelu(self.pair.up(x))).square().mean()


@pytest.mark.parametrize(("channels", "small"), [(2, True), (64, False)])
def test_large_weights_are_not_summed_instead_of_small_activations(channels: int, small: bool) -> None:
    found = plan(Front(channels), torch.zeros(2, 1, 16), 2)
    weights = {f"{name}.{kind}" for name in ("front", "mix") for kind in ("weight", "bias")}
    assert found.partial == (weights if small else frozenset())
    assert found.traffic[""].backward == (0 if small else 1)


# torch looks at gradients as it makes fake tensors, and hides its own warning.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_what_regions_hold_whole_has_partial_gradients() -> None:
    found = small_plan(Around(Mixture()), tensor_plan={"model.mixture": "local"})
    assert [region.module for region in found.regions] == ["model.mixture"]
    assert found.partial == {"model.mixture.router.weight"}


def test_blocks_that_hand_cut_sequences_on_are_run_once() -> None:
    module, (ids,) = build("packed GPT (tied)"), global_batches("packed GPT (tied)", 1, 4)[0]
    found = plan(module, (ids,), 2, sequence=True)
    rehearsal = Rehearsal(parameter_table(module), 2, found.layouts, partial=found.partial, sequence=True)
    run = fake_run(module, lambda: module.training_step((ids,), 0), stacks=find_stacks(module), observers=[rehearsal])
    assert (run.passes, run.blocks_run, run.blocks_repeated) == (1, 1, 1)
    assert rehearsal.traffic == found.traffic
