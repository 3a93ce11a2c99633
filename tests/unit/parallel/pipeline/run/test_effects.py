from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.parallel.pipeline.run.effects import Arguments


class Layer:
    """As a layer of a cache: its tensors come with the first use."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.length = 0
        self.lock = lambda: None


class Cache:
    def __init__(self) -> None:
        self.layers = [Layer()]
        self.options = {"size": 4}
        self.owner: Any = self


def grown(cache: Cache, h: Tensor) -> None:
    cache.layers[0].keys = torch.ones(2)
    cache.layers[0].length += 3
    cache.layers.append(Layer())


def written(cache: Cache, h: Tensor) -> None:
    h.add_(1)


def replaced(cache: Cache, h: Tensor) -> None:
    del cache.options["size"]
    cache.options["other"] = 1
    cache.layers = []


def no_change(cache: Cache, h: Tensor) -> None:
    cache.layers[0].length += 0
    h.sum()


def state(cache: Cache, h: Tensor) -> Any:
    layers = [(None if layer.keys is None else layer.keys.tolist(), layer.length) for layer in cache.layers]
    return layers, cache.options, h.tolist()


@pytest.mark.parametrize("change", [grown, written, replaced, no_change])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_changes_of_arguments_are_made_on_other_ranks(change: Any, mode: Any) -> None:
    with mode():
        one, other = Cache(), Cache()
        h, h_of_other = torch.zeros(2), torch.zeros(2)
        there, here = Arguments((h,), {"cache": one}), Arguments((h_of_other,), {"cache": other})
        change(one, h)
        effects = there.effects()
        assert bool(effects) is (change is not no_change)
        # What travels is made of what the other rank has.
        known = {id(value): here.at(path) for path, (value, _) in there._before.items()}
        here.apply([type(each)(each.path, moved(each.content, known)) for each in effects])
        assert state(other, h_of_other) == state(one, h)
        assert other.owner is other


def moved(content: Any, known: dict[int, Any]) -> Any:
    if id(content) in known:
        return known[id(content)]
    if isinstance(content, list):
        return [moved(each, known) for each in content]
    if isinstance(content, dict):
        return {key: moved(each, known) for key, each in content.items()}
    return content.clone() if isinstance(content, Tensor) else deepcopy(content)


def test_modules_are_not_looked_into() -> None:
    module = nn.Linear(2, 2)
    arguments = Arguments((module,), {})
    module.extra = 1
    assert not arguments.effects()
    assert pickle.dumps(arguments.effects())
