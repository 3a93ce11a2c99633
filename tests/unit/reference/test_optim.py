from __future__ import annotations

import functools
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from lightning_3d.reference import GPT, decay_groups, warmup_cosine
from lightning_3d.reference.optim import lacks_total_steps, lr_factor


def gpt(**options: bool) -> GPT:
    return GPT(vocab_size=11, hidden_size=8, num_layers=1, num_heads=2, max_length=4, **options)  # type: ignore[arg-type]


def names(module: nn.Module, group: list[nn.Parameter]) -> list[str]:
    return [name for name, parameter in module.named_parameters() if any(parameter is p for p in group)]


def test_matrices_decay_and_the_rest_does_not() -> None:
    model = gpt()
    decayed, plain = (names(model, group["params"]) for group in decay_groups(model))
    assert decayed == [
        "token_embedding.weight",
        "position_embedding.weight",
        "blocks.0.attention.query_key_value.weight",
        "blocks.0.attention.output.weight",
        "blocks.0.feed_forward.up.weight",
        "blocks.0.feed_forward.down.weight",
    ]
    assert len(decayed) + len(plain) == len(list(model.parameters()))
    assert all(name.endswith("bias") or "norm" in name for name in plain)


def test_embeddings_may_be_spared_with_the_head_tied_to_them() -> None:
    for tied in (True, False):
        model = gpt(tie_weights=tied)
        decayed, plain = (names(model, group["params"]) for group in decay_groups(model, decay_embeddings=False))
        assert {"token_embedding.weight", "position_embedding.weight"} <= set(plain)
        assert ("head.weight" in decayed) != tied


def test_norms_and_biases_of_any_shape_do_not_decay() -> None:
    model = nn.Sequential(nn.LayerNorm([3, 4]), nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))
    model.register_parameter("wide_bias", nn.Parameter(torch.zeros(2, 2)))
    assert names(model, decay_groups(model)[0]["params"]) == ["1.weight"]


def test_frozen_parameters_are_left_out_and_tied_ones_stand_once() -> None:
    model = gpt()
    model.position_embedding.requires_grad_(False)
    listed = [id(p) for group in decay_groups(model) for p in group["params"]]
    assert id(model.position_embedding.weight) not in listed
    assert listed.count(id(model.head.weight)) == 1
    assert len(listed) == len(set(listed)) == len(list(model.parameters())) - 1


def test_both_groups_exist_even_when_empty() -> None:
    optimizer = torch.optim.AdamW(decay_groups(nn.Linear(2, 2, bias=False)), weight_decay=0.1)
    assert [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [(1, 0.1), (0, 0.0)]


def rates(steps: int, **options: float) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = warmup_cosine(optimizer, **options)  # type: ignore[arg-type]
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_the_rate_rises_falls_and_stays() -> None:
    seen = rates(10, warmup_steps=4, total_steps=8, min_lr_ratio=0.1)
    half = 0.1 + 0.9 * 0.5
    assert seen[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert seen[6] == pytest.approx(2 * half)
    assert seen[8:] == pytest.approx([0.2, 0.2])


def test_warmup_as_a_share_and_longer_than_the_run() -> None:
    assert rates(8, warmup_steps=0.5, total_steps=8) == rates(8, warmup_steps=4, total_steps=8)
    assert rates(3, warmup_steps=100, total_steps=3) == pytest.approx([0.02, 0.04, 0.06])


def test_the_schedule_pickles_and_a_longer_run_follows_its_own_end() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    short, long = (warmup_cosine(optimizer, total_steps=steps) for steps in (10, 1000))
    long.load_state_dict(pickle.loads(pickle.dumps(short.state_dict())))
    assert pickle.loads(pickle.dumps(long.lr_lambdas[0]))(10) == long.lr_lambdas[0](10) > 0.99


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_steps": None}, "total_steps=None"),
        ({"total_steps": 0}, "total_steps=0"),
        ({"total_steps": 9, "warmup_steps": -1}, "warmup_steps=-1"),
        ({"total_steps": 9, "min_lr_ratio": 1.5}, "min_lr_ratio=1.5"),
    ],
)
def test_impossible_schedules(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rates(1, **options)


def test_the_learning_rate_follows_the_batch() -> None:
    assert lr_factor("none", 512, None) == 1
    assert lr_factor("linear", 512, 128) == 4
    assert lr_factor("sqrt", 512, 128) == 2
    with pytest.raises(ValueError, match=r"'cubic' is unknown\n  valid: none, linear, sqrt"):
        lr_factor("cubic", 512, 128)
    with pytest.raises(ValueError, match="base_batch_size=None"):
        lr_factor("linear", 512, None)


def test_which_builders_lack_total_steps() -> None:
    assert lacks_total_steps(functools.partial(warmup_cosine, warmup_steps=3))
    assert not lacks_total_steps(functools.partial(warmup_cosine, total_steps=3))
    assert lacks_total_steps(functools.partial(OneCycleLR, max_lr=1.0))
    assert not lacks_total_steps(functools.partial(CosineAnnealingLR, T_max=3))
