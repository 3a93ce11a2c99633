"""Plain attributes: what has changed is found, made elsewhere, and put back."""

from __future__ import annotations

from collections import deque
from typing import Any

import lightning as L
import torch
from torch import nn

from lightning_3d.graph.attributes import Attributes


class Keeper(L.LightningModule):
    """Keeps results in every usual way."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.count, self.name = 0, "start"
        self.outs: list[Any] = [torch.ones(2)]
        self.best: dict[str, Any] = {"inner": [1], "old": 3, "sum": torch.zeros(())}
        self.seen, self.last = {1}, deque([1, 2], maxlen=2)
        self.running = torch.zeros(2)

    def step(self) -> None:
        self.count += 1
        self.name = "went on"
        self.new = [torch.ones(())]
        self.outs.append(torch.zeros(3))
        self.best["inner"].append(2)
        self.best["sum"] += 1
        self.best["new"] = (1, 2)
        del self.best["old"]
        self.seen.add(2)
        self.last.append(3)
        self.running.add_(2)
        self.model.calls = 1

    def shown(self) -> str:
        held = [self.count, self.name, self.outs, self.best, self.seen, self.last, self.running]
        return repr([*held, vars(self).get("new"), vars(self.model).get("calls")])


def test_changes_are_made_elsewhere() -> None:
    one, other = Keeper(), Keeper()
    attributes = Attributes(one, ["model.blocks.0", "model.blocks.1"])
    before = attributes.now()
    assert not before.changed
    assert before.changes() == ()
    outs = other.outs
    one.step()
    one.outs.append(4)
    assert before.changed
    changes = before.changes()
    assert next(change.content for change in changes if str(change) == "outs")[1] == 4, "only what came is told"
    Attributes(other, ["model.blocks.0"]).change(changes)
    assert other.shown() == one.shown()
    assert other.outs is outs, "whoever else holds it sees it too"


def test_changes_are_put_back() -> None:
    keeper = Keeper()
    shown, outs = keeper.shown(), keeper.outs
    before = Attributes(keeper, ["model.blocks.0"]).now(copies=True)
    keeper.step()
    assert keeper.shown() != shown
    before.put_back()
    assert keeper.shown() == shown
    assert keeper.outs is outs


def test_modules_and_functions_are_no_state() -> None:
    keeper = Keeper()
    before = Attributes(keeper, ["model.blocks.0"]).now()
    keeper.extra = nn.Linear(1, 1)
    keeper.__dict__["log"] = lambda *args: None
    assert not before.changed


def test_what_another_rank_does_not_have_is_left_alone() -> None:
    one, other = Keeper(), Keeper()
    attributes = Attributes(one, ["model.blocks.0"])
    before = attributes.now()
    one.step()
    del other.best
    Attributes(other, ["model.blocks.0"]).change(before.changes())
    assert other.count == 1
