from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import PlanError
from lightning_3d.parallel.tensor.plan import TensorPlan
from tests.unit.parallel.tensor.planned import Both, Pair, reasons, small_plan, states, styles


def test_norms_between_leave_both_weights_whole() -> None:
    pair = Pair(F.gelu)
    pair.between = lambda x: pair.norm(x)
    found = reasons(pair)
    assert found["up.weight"] == "layer_norm over the dim that is cut"
    assert found["down.weight"] == "its outputs meet activations that are whole"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (Doubled.apply, "custom autograd function Doubled"),
        (Passed.apply, "custom autograd function Passed"),
        (lambda x: checkpoint(F.gelu, x, use_reentrant=True), "custom autograd function CheckpointFunction"),
    ],
    ids=["computes", "passes", "reentrant checkpoint"],
)
def test_foreign_autograd_functions_take_whole_tensors(between: Callable[[Tensor], Tensor], reason: str) -> None:
    assert reason in reasons(Pair(between))["up.weight"]


def test_checkpoints_without_reentry_are_seen_through() -> None:
    found = reasons(Pair(lambda x: checkpoint(F.gelu, x, use_reentrant=False)))
    assert found["up.weight"] == "column dim 0"
    assert found["down.weight"] == "row dim 1"


def test_weights_are_seen_without_a_graph() -> None:
    pair = Pair(F.gelu)
    pair.scale = nn.Parameter(torch.ones(32, 32))

    def forward(x: Tensor) -> Tensor:
        with torch.no_grad():
            # Views of a parameter say that they want a gradient, here too.
            norm = torch.mv(pair.scale.t(), torch.ones(32)).norm()
        return x + pair.down(F.gelu(pair.up(x @ (pair.scale / norm))))

    pair.forward = forward
    assert reasons(pair)["up.weight"] == "column dim 0"


def test_columns_without_a_row_are_whole() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alone, self.score = nn.Linear(32, 96), nn.Linear(32, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.alone(x).sort().values.mean() + self.score(x).logsumexp(-1).mean()

    found = reasons(Mixed())
    assert found["alone.weight"] == "sort over the dim that is cut"
    assert found["score.weight"] == "8 outputs of 32 inputs save less than the sums of gradients cost"
    head = reasons(nn.Linear(32, 96))
    assert head["weight"] == "column dim 0"


def test_logits_may_leave_the_step() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            logits = self.head(x)
            return {"loss": logits.logsumexp(-1).mean(), "logits": logits}

    assert reasons(Logits())["head.weight"] == "column dim 0"


def test_a_residual_is_not_cut_for_outputs_without_a_row() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(x)

    assert reasons(Whole())["linear.weight"] == "its outputs meet activations that are whole"


def test_weights_of_one_row_are_whole_together() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.silu(self.gate(x)) * self.up(x))

    free = reasons(Gated())
    assert (free["gate.weight"], free["down.weight"]) == ("column dim 0", "row dim 1")
    found = reasons(Gated(), tensor_plan={"*.tested.gate": "replicate"})
    assert found["gate.weight"] == "tensor_plan['*.tested.gate']='replicate'"
    assert found["up.weight"] == "its outputs meet activations that are whole"
    found = reasons(Gated(), tensor_plan={"*.tested.down": "replicate"})
    assert found["up.weight"].startswith("the row weight model.tested.down.weight that would sum its outputs stays")


def test_adapters_beside_frozen_weights() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down = nn.Linear(32, 64).requires_grad_(False), nn.Linear(64, 32)
            self.a, self.b = nn.Linear(32, 8, bias=False), nn.Linear(8, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.base(x) + 2 * self.b(F.dropout(self.a(x)))))

    found = reasons(Adapted())
    assert found["a.weight"] == "an inner width of 8 beside 64 saves less than its sums cost"
    assert (found["base.weight"], found["b.weight"], found["down.weight"]) == (
        "column dim 0",
        "column dim 0",
        "row dim 1",
    )


def test_weights_that_are_used_in_two_ways_are_whole() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.square = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.square(F.gelu(self.square(x)))

    assert reasons(Twice())["square.weight"] == "it is used in two ways: column dim 0, row dim 1"


def test_products_with_exchanged_weights() -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.ones(64, 32)), nn.Parameter(torch.ones(64, 32))

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(x @ self.up.T) @ self.down

    assert reasons(Written()) == {"up": "column dim 0", "down": "row dim 0"}


def test_one_projection_of_images() -> None:
    class Timm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            batch, count, width = x.shape
            q, k, v = self.qkv(x).reshape(batch, count, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2)
            return x + self.proj(mixed.reshape(batch, count, width))

    for size in (2, 4):
        found = reasons(Timm(), size)
        assert found["qkv.weight"] == "column dim 0 in 32|32|32"
        assert found["proj.weight"] == "row dim 1"


# ---- numbers that do not divide ----


class Sized(nn.Module):
    """GPT-2 XL's awkward numbers: a vocabulary and heads that few degrees divide."""

    def __init__(self, vocabulary: int = 50257, heads: int = 25, width: int = 100) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Embedding(vocabulary, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = Pair(F.gelu, 4 * width, width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return F.linear(self.mlp(x), self.tokens.weight)


def sized_plan(size: int) -> TensorPlan:
    with torch.device("meta"):
        module = Sized()
    return small_plan(module, size, torch.zeros(2, 6, dtype=torch.long))


def test_vocabularies_and_heads_that_do_not_divide() -> None:
    found = sized_plan(4)
    shown = styles(found, "model.")
    assert shown["tokens.weight"] == "50257 rows are not a multiple of 4 (pad_vocabulary=true pads them)"
    assert shown["qkv.weight"].startswith("25 heads are not a multiple of 4")
    assert shown["mlp.up.weight"] == "column dim 0"
    assert shown["mlp.down.weight"] == "row dim 1"
    assert 0 < found.share < 0.05
    shown = styles(sized_plan(5), "model.")
    assert shown["qkv.weight"] == "column dim 0 in 100|100|100"
    assert shown["tokens.weight"] == "50257 rows are not a multiple of 5 (pad_vocabulary=true pads them)"


def test_heads_of_torchs_own_attention() -> None:
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    assert styles(small_plan(layer, 4), "model.self_attn") == {
        ".in_proj_weight": "2 heads are not a multiple of 4",
        ".out_proj.weight": "2 heads are not a multiple of 4",
    }


def test_nothing_to_cut_lists_what_would_do() -> None:
    with pytest.raises(PlanError, match="tensor_parallel_size=7: no parameter") as caught:
        small_plan(Pair(F.gelu, 60, 30), 7, states(30))
    text = str(caught.value)
    assert "60 rows are not a multiple of 7" in text
    assert "valid: tensor_parallel_size of 1, 2, 3, 4, 5, 6, 12" in text


# ---- the user's own plan ----


def test_styles_that_the_user_wants() -> None:
    wanted = {"*.tested.up": "column", "*.tested.down": "row"}
    pair = Pair(F.gelu)
    pair.between = lambda x: pair.norm(x)
    found = small_plan(Both(pair), tensor_plan=wanted)
    shown = styles(found, "model.tested.")
    assert (shown["up.weight"], shown["down.weight"]) == ("column dim 0", "row dim 1")
    assert {row.source for row in found.rows if row.name.startswith("model.tested.up.w")} == {"plan"}
    assert "[plan]" in str(found)


def test_a_style_without_a_use_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Unflatten(1, (2, 3)), nn.Flatten(1, 2), Pair(F.gelu))
    model.append(nn.Conv1d(6, 6, 1))
    with pytest.raises(PlanError, match=r"model.4.weight: the step uses it in no linear layer"):
        small_plan(model, tensor_plan={"model.4": "column"})
