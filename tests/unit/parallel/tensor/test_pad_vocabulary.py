"""Plans of models whose vocabulary the ranks do not divide."""

from __future__ import annotations

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.errors import PlanError
from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.parallel.tensor.plan import TensorPlan
from lightning_3d.parallel.tensor.planning import find_tensor_plan
from lightning_3d.shards.layout import Layout

VOCABULARY, WIDTH = 50257, 32


class Words(L.LightningModule):
    """A tied head and one of its own, around a layer whose hidden features the ranks do not divide either."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 51), nn.Linear(51, WIDTH)
        self.own = nn.Linear(WIDTH, VOCABULARY)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        x = self.words(ids)
        x = x + self.down(F.gelu(self.up(x)))
        scores = (F.linear(x, self.words.weight), self.own(x))
        return sum(F.cross_entropy(each.view(-1, VOCABULARY), ids.flatten()) for each in scores)


def planned(size: int, tensor_plan: dict[str, str] | None = None, *, pad_vocabulary: bool = True) -> TensorPlan:
    with torch.device("meta"):
        module = Words()
    return find_tensor_plan(
        module,
        lambda: module.training_step(torch.zeros(2, 6, dtype=torch.long), 0),
        parameters=parameter_table(module),
        stacks=find_stacks(module),
        size=size,
        tensor_plan=tensor_plan,
        pad_vocabulary=pad_vocabulary,
    )


@pytest.mark.parametrize("size", [2, 4, 8])
def test_tables_and_heads_are_cut_unevenly_and_nothing_else(size: int) -> None:
    found = planned(size)
    words = Layout(0, (VOCABULARY,))
    assert found.layouts == {"words.weight": words, "own.weight": words, "own.bias": words}
    reasons = {row.name: row.reason for row in found.rows}
    assert reasons["up.weight"] == f"51 rows are not a multiple of {size}"


def test_vocabularies_stay_whole_unless_it_is_asked_for() -> None:
    with pytest.raises(PlanError, match="no parameter of the model can be cut"):
        planned(2, pad_vocabulary=False)


def test_the_users_styles_may_ask_for_it() -> None:
    style = {"words": "vocab"}
    assert planned(2, style).layouts["words.weight"] == Layout(0, (VOCABULARY,))
    with pytest.raises(PlanError, match="50257 rows of its vocabulary, which 2 ranks do not divide") as caught:
        planned(2, style, pad_vocabulary=False)
    assert "pad_vocabulary=true" in str(caught.value)
