from __future__ import annotations

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_3d.errors import PlanError
from lightning_3d.parallel.tensor.plan import TensorPlan
from lightning_3d.parallel.tensor.proof import ranks
from lightning_3d.parallel.tensor.proof.prove import prove
from lightning_3d.parallel.tensor.proof.ranks import StepCall
from lightning_3d.parallel.tensor.proof.result import Proof
from lightning_3d.parallel.tensor.regions.plan import Region
from lightning_3d.shards import nodes
from lightning_3d.shards.executor import Shard
from lightning_3d.shards.group import ShardGroup
from lightning_3d.shards.layout import Layout
from lightning_3d.shards.rules import contractions
from lightning_3d.shards.tensor import ShardTensor
from tests.unit.parallel.tensor.experts import Mixture
from tests.unit.parallel.tensor.proving import Net, batch, known, planned, training

# ---- what is not ----


def _assert_caught(module: L.LightningModule, call: StepCall, plan: TensorPlan, *, at_least: float = 1e-3) -> PlanError:
    with pytest.raises(PlanError, match="is not exact") as caught:
        prove(module, call, plan)
    error = float(str(caught.value).split(" by ")[-1].split(",")[0])
    assert error > at_least
    # Keeping whole what is whole already would help nobody.
    (named,) = re.findall(r"^tensor_plan=\{'(.*)': 'replicate'\}$", str(caught.value.fix))
    assert any(fnmatchcase(name.rpartition(".")[0], named) for name in plan.layouts)
    return caught.value


def test_a_row_weight_whose_sum_is_missing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = Net(), training(batch())
    plan = planned(module, call)
    assert any(row.style == "row" for row in plan.rows)
    monkeypatch.setattr(contractions, "summed", lambda partial, shard, dim=-2: partial)
    error = _assert_caught(module, call, plan)
    assert "on 2 ranks" in error.fact


def test_a_gradient_that_is_not_summed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of norms on heads, each rank of which knows its heads only."""
    module, call = known("HF Qwen3")
    plan = planned(module, call)
    norms = [name for name in plan.partial if name.endswith("_norm.weight")]
    assert len(norms) == 4
    copy = nodes.copy
    monkeypatch.setattr(nodes, "copy", lambda value, group: value if value.dim() == 1 else copy(value, group))
    error = _assert_caught(module, call, replace(plan, partial=frozenset()))
    assert "2 of 14 gradients" in error.fact
    assert "_norm.weight (replicate)" in error.fact
    # They are whole already, what they follow is not.
    assert error.fix == "tensor_plan={'model.model.layers.*.self_attn.q_proj': 'replicate'}"


def test_a_bias_that_is_added_on_every_rank_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases are zero in many fresh models, where the loss would tell nothing."""
    module, call = Net(), training(batch())
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)

    def by_rows(x: Tensor, weight: ShardTensor, bias: Tensor | None, product: Any, dim: int | None) -> Tensor:
        assert isinstance(x, ShardTensor)
        return contractions.summed(product(x._local, weight._local, bias), weight, dim=dim)

    plan = planned(module, call)
    monkeypatch.setattr(contractions, "_by_rows", by_rows)
    _assert_caught(module, call, plan)


def test_packed_weights_in_wrong_segments_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = known("packed GPT (tied)")
    plan = planned(module, call)
    assert any(layout.segments == (32, 32, 32) for layout in plan.layouts.values())

    def swapped(local: Tensor, dim: int, segments: tuple[int, ...], group: ShardGroup) -> Shard:
        return Shard(local, dim, (sum(segments),), group)

    monkeypatch.setattr(ranks, "Shard", swapped)
    _assert_caught(module, call, plan)


class Experts(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.moe, self.head = Mixture(inner=16), nn.Linear(32, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.moe(batch)[0]).square().mean()


# torch looks at gradients as it makes fake tensors, and hides its own warning.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_router_that_is_cut_in_a_region_is_caught() -> None:
    module = Experts()
    call = training(torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0)))
    plan = planned(module, call, tensor_plan={"moe": "local"})
    assert isinstance(prove(module, call, plan), Proof)
    (region,) = plan.regions
    router = {"moe.router.weight": Layout(0, (4,))}
    rows = tuple(
        replace(row, style="column", layout=router[row.name]) if row.name in router else row for row in plan.rows
    )
    wrong = Region(module="moe", layouts={**region.layouts, **router}, outputs=region.outputs, error=region.error)
    _assert_caught(module, call, replace(plan, rows=rows, regions=(wrong,)))


def test_a_sum_that_one_rank_leaves_out_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = Net(), training(batch())
    plan = planned(module, call)
    reduce = nodes.reduce
    monkeypatch.setattr(nodes, "reduce", lambda value, group: reduce(value, group) * (1 + 0.01 * group.rank))
    _assert_caught(module, call, plan)


def test_a_step_that_gives_something_else_on_ranks_is_caught() -> None:
    class Different(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = self(batch).square().mean()
            return {"loss": loss, "more": loss} if isinstance(self.first.weight, ShardTensor) else {"loss": loss}

    call = training(batch())
    with pytest.raises(PlanError, match=r"the loss is off by inf, relative to one device"):
        prove(Different(), call, planned(Net(), call))


def test_a_step_that_fails_on_ranks_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = Net(), training(batch())
    plan = planned(module, call)

    def fails(*args: object, **kwargs: object) -> Tensor:
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(contractions, "summed", fails)
    with pytest.raises(PlanError, match=r"does not run on 2 tensor-parallel ranks: RuntimeError: no kernel\."):
        prove(module, call, plan)
