"""Scores in 32 bits whose copy is put off: the values are those of the copy, and losses do without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.errors import ModuleError
from lightning_3d.shards.executor import Shard
from lightning_3d.shards.late import LateShard
from lightning_3d.shards.layout import take
from tests.unit.shards.threads import ThreadShardGroup, run_threads, whole

WORDS = 4096
LOGITS = torch.randn(2, 3, WORDS, generator=torch.Generator().manual_seed(1)).bfloat16()
TARGETS = torch.arange(6) * 600


def on_ranks(function: Callable[[Any, Tensor], Any]) -> list[Any]:
    """Calls a function with late scores and the leaf below them, on two ranks."""

    def rank(group: ThreadShardGroup) -> Any:
        leaf = take(LOGITS, 2, (WORDS,), group.rank, group.size).clone().requires_grad_()
        late = Shard(leaf * 1, 2, (WORDS,), group).float()
        assert isinstance(late, LateShard)
        return function(late, leaf)

    return run_threads(2, rank)


def reference(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    leaf = LOGITS.clone().requires_grad_()
    result = function((leaf * 1).float())
    result.sum().backward()
    assert leaf.grad is not None
    return result.detach(), leaf.grad


def loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, WORDS), TARGETS)


def shifted(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().flatten(0, 1), TARGETS[:4])


def by_channels(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), TARGETS.view(2, 3))


@pytest.mark.parametrize("function", [loss, shifted, by_channels])
def test_losses_make_no_copy(function: Callable[[Tensor], Tensor]) -> None:
    expected, gradient = reference(function)

    def run(late: LateShard, leaf: Tensor) -> tuple[Tensor, Tensor | None, bool]:
        result = function(late)
        result.backward()
        return result.detach(), leaf.grad, late.pending

    results, gradients, pending = zip(*on_ranks(run), strict=True)
    assert all(pending)
    for result in results:
        assert result.dtype == torch.float32
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(whole(gradients, 2), gradient)


OTHERS: dict[str, Callable[[Any], Tensor]] = {
    "product": lambda logits: logits * 1.5,
    "softmax": lambda logits: torch.softmax(logits.view(-1, WORDS), -1),
    "sum": lambda logits: logits.sum(-1),
    "view of a product": lambda logits: (logits[:, :2] / 3).flatten(),
    "in place, seen by a view": lambda logits: (logits.view(-1, WORDS), logits.mul_(2))[0],
    "in place on a view": lambda logits: (logits.view(-1, WORDS)[1:].mul_(2), logits)[1],
}


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_computes_with_the_copy(name: str) -> None:
    function = OTHERS[name]
    expected, gradient = reference(function)

    def run(late: LateShard, leaf: Tensor) -> tuple[Any, Tensor | None]:
        result = function(late)
        local = result._local if isinstance(result, Shard) else result
        assert local.dtype == torch.float32
        local.sum().backward()
        return result, leaf.grad

    results, gradients = zip(*on_ranks(run), strict=True)
    ours = results[0]
    if isinstance(ours, Shard):
        ours = whole([each._local for each in results], ours._dim, ours._segments)
    torch.testing.assert_close(ours.detach(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole(gradients, 2), gradient)


def test_a_copy_made_without_gradients_has_them_later() -> None:
    def run(late: LateShard, leaf: Tensor) -> Tensor | None:
        with torch.no_grad():
            late.view(-1, WORDS).exp()
        (late.view(-1, WORDS) * 2)._local.sum().backward()
        return leaf.grad

    for gradient in on_ranks(run):
        assert torch.equal(gradient, torch.full_like(gradient, 2))


def test_choices_make_no_copy() -> None:
    def run(late: LateShard, _: Tensor) -> Tensor:
        words = late.argmax(-1)
        assert late.pending
        return words

    for words in on_ranks(run):
        assert torch.equal(words, LOGITS.float().argmax(-1))


def test_it_shows_itself_in_32_bits() -> None:
    def run(late: LateShard, leaf: Tensor) -> None:
        assert (late.dtype, late.itemsize, late.element_size()) == (torch.float32, 4, 4)
        assert (late.shape, late.size(-1), late.dim(), late.ndim) == ((2, 3, WORDS), WORDS, 3, 3)
        assert (late.numel(), late.nbytes, late.device) == (6 * WORDS, 24 * WORDS, leaf.device)
        assert late.requires_grad
        assert late.is_contiguous()
        assert late.float() is late
        assert late.to(torch.float32) is late
        assert late.pending

    on_ranks(run)


def test_what_is_written_to_before_the_copy_is_refused() -> None:
    def run(late: LateShard, _: Tensor) -> None:
        late._narrow.mul_(2)
        with pytest.raises(ModuleError, match="in place"):
            late.exp()

    on_ranks(run)


@pytest.mark.parametrize("other", ["few classes", "another dim", "32 bits", "another type"])
def test_other_shards_are_widened_at_once(other: str) -> None:
    def run(group: ThreadShardGroup) -> Tensor:
        words, dim = (WORDS // 2 if other == "few classes" else WORDS), 0 if other == "another dim" else 1
        local = torch.ones(2, words // 2, dtype=torch.float32 if other == "32 bits" else torch.bfloat16)
        shard = Shard(local, dim, (4 if dim == 0 else words,), group)
        return shard.to(torch.float64) if other == "another type" else shard.to(dtype=torch.float32)

    for wide in run_threads(2, run):
        assert not isinstance(wide, LateShard)
        assert wide.dtype == (torch.float64 if other == "another type" else torch.float32)


def test_autocast_has_the_loss_in_32_bits() -> None:
    def run(group: ThreadShardGroup) -> tuple[Tensor, Tensor]:
        logits = Shard(take(LOGITS, 2, (WORDS,), group.rank, group.size), 2, (WORDS,), group).view(-1, WORDS)
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(logits, TARGETS), F.nll_loss(logits, TARGETS)

    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(LOGITS.view(-1, WORDS), TARGETS), F.nll_loss(LOGITS.view(-1, WORDS), TARGETS)
    for result in run_threads(2, run):
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
