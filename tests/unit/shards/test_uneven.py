"""A vocabulary that the ranks do not divide: the last rank holds less of it, and nothing shows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.shards.executor import Shard
from lightning_3d.shards.layout import Layout, by_rank
from tests.unit.shards.operations import check, operand
from tests.unit.shards.threads import ThreadShardGroup, run_threads

V, WIDTH = 97, 6
SIZES = pytest.mark.parametrize("size", [2, 3, 4])
WORDS = Layout(0, (V,))

Function = Callable[..., Any]

ON_SHARDS: Mapping[str, Function] = {
    "float and scale": lambda x: x.float().double() * 3 + 1,
    "beside a whole": lambda x: x + torch.arange(V) / V,
    "beside a column": lambda x: x * torch.ones(5, 1),
    "beside itself": lambda x: torch.where(x > 0.5, x, x.log()),
    "in place": lambda x: x.clone().masked_fill_(torch.arange(V) == 96, -1.0),
    "flat tokens": lambda x: x.view(-1, V),
    "flat tokens, unknown vocabulary": lambda x: x.reshape(2 * 5, -1),
    "flat tokens and back": lambda x: x.flatten(0, 1).unflatten(0, (2, 5)),
    "all but the last token": lambda x: x[..., :-1, :].contiguous(),
    "all of the vocabulary": lambda x: x[:, :, :V],
    "one token": lambda x: x[:, -1],
    "narrow": lambda x: x.narrow(-1, 0, V),
    "tokens last": lambda x: x.transpose(1, 2).permute(1, 0, 2),
    "one more dim": lambda x: x.unsqueeze(2).expand(-1, -1, 3, V),
    "tokens twice": lambda x: x.repeat(1, 2, 1),
    "several": lambda x: torch.cat([x, torch.stack([x[0], x[1]]), torch.ones(1, 5, V).double()], 0),
    "soft capped": lambda x: 30 * torch.tanh(x / 30),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-1),
    "chances of chances": lambda x: x.softmax(-1).log().mul(2).softmax(-1),
    "clone": lambda x: x.clone(),
}
REPLICATED: Mapping[str, Function] = {
    "sum": lambda x: x.sum(-1),
    "sum of all": lambda x: x.sum(),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "mean of all": lambda x: x.mean(),
    "any and all": lambda x: ((x > 0.89).any(-1), (x > 0).all(-1)),
    "amax": lambda x: x.amax((1, 2)),
    "max of all": lambda x: x.max(),
    "amin": lambda x: x.amin(-1),
    "max": lambda x: x.max(-1),
    "min": lambda x: torch.min(x, -1, keepdim=True),
    "argmax": lambda x: x.argmax(-1),
    "argmin": lambda x: torch.argmin(x, dim=-1),
    "a few": lambda x: x.topk(3, -1),
    "more than the last rank holds": lambda x: x.topk(40, -1),
    "all of them": lambda x: x.topk(V, -1, largest=False),
    "logsumexp": lambda x: x.logsumexp(-1),
    "gather": lambda x: x.gather(-1, torch.arange(30).view(2, 5, 3) * 3 + 9),
    "squared error": lambda x: F.mse_loss(x, torch.zeros(2, 5, V).double()),
}
WITHOUT_A_RULE: Mapping[str, Function] = {
    "some of the vocabulary": lambda x: x[..., :50],
    "every other word": lambda x: x[..., ::2],
    "one word": lambda x: x[..., 96],
    "in pieces": lambda x: x.split([90, 7], -1),
    "in one piece": lambda x: x.split(V, -1),
    "cut in two": lambda x: x.chunk(2, -1),
    "words twice": lambda x: x.repeat(1, 1, 2),
    "each word twice": lambda x: x.repeat_interleave(2, -1),
    "one after the other": lambda x: torch.cat([x, x], -1),
    "beside more words": lambda x: torch.cat([x, torch.zeros(2, 5, 3).double()], -1),
    "flat": lambda x: x.view(-1),
    "tokens and words": lambda x: x.flatten(1),
    "sorted": lambda x: x.sort(-1),
    "cumulated": lambda x: x.cumsum(-1),
    "deviation": lambda x: x.std(-1),
    "longer": lambda x: F.pad(x, (0, 3)),
}


def logits(*leading: int, seed: int = 0) -> Any:
    return operand(*(leading or (2, 5)), V, cut=len(leading or (2, 5)), seed=seed)


@SIZES
@pytest.mark.parametrize("name", ON_SHARDS)
def test_stays_cut(name: str, size: int) -> None:
    check(ON_SHARDS[name], logits(), size=size)


@SIZES
@pytest.mark.parametrize("name", REPLICATED)
def test_is_known_to_all(name: str, size: int) -> None:
    check(_without_gathers(REPLICATED[name]), logits(), size=size, on_shards=None)


@SIZES
@pytest.mark.parametrize("name", WITHOUT_A_RULE)
def test_is_computed_on_the_whole(name: str, size: int) -> None:
    check(WITHOUT_A_RULE[name], logits(), size=size, on_shards=False)


def _without_gathers(operation: Function) -> Function:
    def call(x: Tensor) -> Any:
        result = operation(x)
        assert not isinstance(x, Shard) or not x._group._gathers
        return result

    return call


LOSSES: Mapping[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum", "ignore_index": 96},
    "none": {"reduction": "none"},
    "weights": {"weight": torch.arange(V).double() + 1},
    "smoothed": {"label_smoothing": 0.2},
    "smoothed with weights": {"label_smoothing": 0.2, "weight": torch.arange(V).double() + 1, "ignore_index": 3},
}


@SIZES
@pytest.mark.parametrize("name", LOSSES)
def test_cross_entropy(name: str, size: int) -> None:
    targets = torch.tensor([0, 3, 24, 25, 48, 49, 72, 75, 95, 96])
    loss = _without_gathers(lambda x: F.cross_entropy(x, targets, **LOSSES[name]))
    check(loss, logits(10), size=size, on_shards=None)


@SIZES
def test_other_losses(size: int) -> None:
    targets = torch.tensor([0, 24, 25, 96])
    chances = torch.rand(4, V, generator=torch.Generator().manual_seed(1)).double().softmax(-1)
    for loss in (
        lambda x: F.nll_loss(x.log_softmax(-1), targets, weight=torch.arange(V).double() + 1),
        lambda x: F.cross_entropy(x, chances, label_smoothing=0.1),
        lambda x: F.kl_div(x.log_softmax(-1), chances, reduction="batchmean"),
    ):
        check(_without_gathers(loss), logits(4), size=size, on_shards=None)


@SIZES
@pytest.mark.parametrize("word", [-101, 97, 98, 99, 100])
def test_words_that_do_not_exist(word: int, size: int) -> None:
    table = torch.rand(V, WIDTH)

    def look_up(group: ThreadShardGroup) -> None:
        words = Shard(WORDS.part(table, group.rank, group.size), 0, (V,), group)
        with pytest.raises(IndexError):
            F.embedding(torch.tensor([word]), words)
        with pytest.raises(IndexError):
            F.cross_entropy(words.t(), torch.full((WIDTH,), word))

    run_threads(size, look_up)


@SIZES
def test_infinite_scores_choose_words_that_exist(size: int) -> None:
    scores = torch.full((2, V), -torch.inf)
    scores[:, 5] = 1

    def choose(group: ThreadShardGroup) -> Tensor:
        shard = Shard(Layout(1, (V,)).part(scores, group.rank, group.size), 1, (V,), group)
        assert torch.equal(shard.argmax(-1), torch.tensor([5, 5]))
        return shard.topk(30).indices

    for chosen in run_threads(size, choose):
        assert int(chosen.max()) < V
        assert all(len(row.unique()) == 30 for row in chosen)


def run_model(words: Tensor, bias: Tensor, inputs: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """A model with a tied head, as users write it."""
    hidden = torch.tanh(F.embedding(inputs, words, padding_idx=1))
    scores = F.linear(hidden, words, bias)
    # What is no number at places that nobody looks at.
    scores = scores.square().sqrt() + scores
    loss = F.cross_entropy(scores[..., :-1, :].reshape(-1, V), targets[..., 1:].reshape(-1))
    (loss + scores.double().logsumexp(-1).square().mean()).backward()
    return loss.detach(), scores.detach().argmax(-1), scores.detach().topk(5, -1).values


@SIZES
def test_scores_that_are_widened_late(size: int) -> None:
    words = 5003
    scores = torch.randn(6, words, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.tensor([0, 1250, 2501, 2502, 5001, 5002])
    one = scores.clone().requires_grad_()
    expected = F.cross_entropy(one.float().view(2, 3, words).flatten(0, 1), targets)
    expected.backward()

    def on_rank(group: ThreadShardGroup) -> None:
        own = Layout(1, (words,)).part(scores, group.rank, group.size).clone().requires_grad_()
        wide = Shard(own, 1, (words,), group).float().view(2, 3, words).flatten(0, 1)
        loss = F.cross_entropy(wide, targets)
        loss.backward()
        assert not group._gathers
        torch.testing.assert_close(loss, expected)
        assert one.grad is not None
        torch.testing.assert_close(own.grad, Layout(1, (words,)).part(one.grad, group.rank, group.size))

    run_threads(size, on_rank)


@SIZES
def test_a_model_with_a_tied_head(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    table, shift = (torch.randn(*shape, generator=generator).double() for shape in ((V, WIDTH), (V,)))
    inputs, targets = (torch.randint(V, (3, 8), generator=generator) for _ in range(2))
    words, bias = table.clone().requires_grad_(), shift.clone().requires_grad_()
    expected = run_model(words, bias, inputs, targets)

    def on_rank(group: ThreadShardGroup) -> None:
        own = [WORDS.part(each, group.rank, group.size).clone().requires_grad_() for each in (table, shift)]
        results = run_model(*(Shard(each, 0, (V,), group) for each in own), inputs, targets)
        assert not group._gathers
        for result, one in zip(results, expected, strict=True):
            torch.testing.assert_close(result, one, rtol=1e-10, atol=1e-12)
        for each, whole in zip(own, (words, bias), strict=True):
            assert whole.grad is not None
            torch.testing.assert_close(
                each.grad, WORDS.part(whole.grad, group.rank, group.size), rtol=1e-10, atol=1e-12
            )

    run_threads(size, on_rank)


@pytest.mark.parametrize(("size", "lengths"), [(1, [97]), (2, [49, 48]), (3, [33, 33, 31]), (4, [25, 25, 25, 22])])
def test_parts_are_padded_at_rest(size: int, lengths: list[int]) -> None:
    whole = torch.rand(V, 3)
    parts = [WORDS.part(whole, rank, size) for rank in range(size)]
    padded = [WORDS.padded(part, size) for part in parts]
    assert [len(part) for part in parts] == lengths
    assert [start for ((start, _),) in (WORDS.runs(rank, size) for rank in range(size))] == [
        lengths[0] * rank for rank in range(size)
    ]
    assert {len(part) for part in padded} == {WORDS.padded_length(size)} == {lengths[0]}
    assert not padded[-1][lengths[-1] :].any()
    assert torch.equal(torch.cat(padded), by_rank(whole, 0, (V,), size))
    assert torch.equal(WORDS.without_padding(padded[-1], size - 1, size), parts[-1])
    assert torch.equal(WORDS.whole(parts), whole)
    assert torch.equal(WORDS.whole(padded), whole)


def test_every_rank_holds_something() -> None:
    assert WORDS.fits(4, padded=True)
    assert not WORDS.fits(4)
    # Parts of two leave nothing to the last of four ranks.
    assert not Layout(0, (6,)).fits(4, padded=True)
    assert not Layout(0, (6,)).fits(8, padded=True)
    assert not Layout(0, (5, 5)).fits(2, padded=True)
