"""Marks of partial gradients may be right or wrong: numbers are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.parallel.tensor.plan import TensorPlan
from lightning_3d.parallel.tensor.proof.prove import prove
from lightning_3d.parallel.tensor.proof.result import Proof
from tests.parity.tensor_models import FP32_INSIDE
from tests.unit.parallel.tensor.proving import known, planned

Marks = Callable[[TensorPlan], frozenset[str]]


def right(plan: TensorPlan) -> frozenset[str]:
    return plan.partial


def none(plan: TensorPlan) -> frozenset[str]:
    return frozenset()


def all_of_them(plan: TensorPlan) -> frozenset[str]:
    return frozenset(row.name for row in plan.rows if row.layout is None)


def every_other(plan: TensorPlan) -> frozenset[str]:
    return frozenset(sorted(all_of_them(plan))[::2])


def others(plan: TensorPlan) -> frozenset[str]:
    return all_of_them(plan) - plan.partial


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("marks", [none, all_of_them, every_other, others])
@pytest.mark.parametrize(
    ("name", "size"), [("HF Llama (GQA)", 4), ("HF Gemma", 2), ("HF BERT", 2), ("HF T5", 2), ("nn.Transformer", 2)]
)
def test_wrong_marks_are_exact(name: str, size: int, marks: Marks, sequence: bool) -> None:
    module, call = known(name)
    plan = planned(module, call, size, sequence=sequence)
    found = prove(module, call, replace(plan, partial=marks(plan)))
    assert isinstance(found, Proof)
    assert found.error < (1e-6 if name in FP32_INSIDE else 1e-12)


class Again(nn.Module):
    """Computes a part again in backward."""

    def __init__(self, part: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.part, self.reentrant = part, reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.part, x, use_reentrant=self.reentrant)
        return result


@pytest.mark.parametrize(
    ("marks", "reentrant"), [(right, False), (all_of_them, False), (right, True)], ids=["right", "wrong", "reentrant"]
)
def test_checkpoints_inside_blocks_are_exact(marks: Marks, reentrant: bool) -> None:
    module, call = known("HF Llama (GQA)")
    for layer in module.model.model.layers:
        layer.mlp, layer.input_layernorm = Again(layer.mlp, reentrant), Again(layer.input_layernorm, reentrant)
        if not reentrant:
            layer.self_attn.k_proj = Again(layer.self_attn.k_proj, reentrant)
    plan = planned(module, call, 4)
    assert plan.partial
    found = prove(module, call, replace(plan, partial=marks(plan)))
    assert isinstance(found, Proof), found
    assert found.error < 1e-12
