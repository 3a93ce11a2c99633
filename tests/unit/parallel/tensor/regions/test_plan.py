from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.errors import PlanError
from lightning_3d.graph.parameters import parameter_table
from lightning_3d.parallel.tensor.hints import hinted_regions
from lightning_3d.parallel.tensor.overrides import Overrides, plan_overrides
from lightning_3d.parallel.tensor.regions.plan import Candidate, RegionPlan, plan_regions, region_candidates
from lightning_3d.parallel.tensor.regions.trial import CallSample
from lightning_3d.shards.layout import Layout
from tests.unit.parallel.tensor.experts import HIDDEN, Mixture, Stacked, mixtral, qwen, routed

_EXPERTS = "model.layers.{}.mlp.experts"


def plan(module: nn.Module, sample: CallSample, degree: int = 2, **options: Any) -> RegionPlan:
    whole = nn.ModuleDict({"moe": module})
    candidates = region_candidates(whole, Overrides(), observed=["moe"])
    return plan_regions(whole, parameter_table(whole), candidates, {"moe": sample}, degree, **options)


def hinted(model: nn.Module, sample: CallSample, degree: int = 2) -> RegionPlan:
    candidates = region_candidates(model, Overrides(), hinted_regions(model))
    calls = {_EXPERTS.format(0): sample}
    return plan_regions(model, parameter_table(model), candidates, calls, degree)


def tokens(device: str = "cpu") -> CallSample:
    return CallSample(args=(torch.empty(2, 7, HIDDEN, device=device),))


def named(tokens: int = 10) -> CallSample:
    positional = routed(tokens).args
    return CallSample(args=positional[:2], kwargs={"weights": positional[2]})


def mixture_layouts(inner: int, *, shared: bool = False) -> dict[str, Layout]:
    one = {"w1.weight": 0, "w1.bias": 0, "w3.weight": 0, "w2.weight": 1}
    found = {
        f"moe.experts.{index}.{name}": Layout(dim, (inner,)) for index in range(4) for name, dim in one.items()
    }  # fmt: skip
    if shared:
        found |= {f"moe.shared.{name}": Layout(dim, (2 * inner,)) for name, dim in one.items()}
    return found


# ---- Hugging Face ----


@pytest.mark.parametrize("implementation", [None, "eager", "batched_mm"])
@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize(("build", "inner"), [(mixtral, 64), (qwen, 16)])
def test_experts_of_hugging_face(build: Any, inner: int, degree: int, implementation: str | None) -> None:
    options = {} if implementation is None else {"experts_implementation": implementation}
    found = hinted(build(**options), routed(), degree)
    assert found.refused == {}
    assert found.layouts == {
        f"{_EXPERTS.format(layer)}.{name}": layout
        for layer in range(2)
        for name, layout in {
            "gate_up_proj": Layout(1, (inner, inner)),
            "down_proj": Layout(2, (inner,)),
        }.items()
    }
    assert all(region.outputs == {True: ("sum",), False: ("sum",)} for region in found.regions)


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_a_layer_of_gigabytes_on_the_meta_device_is_tried_on_little(implementation: str) -> None:
    with torch.device("meta"):
        model = mixtral(experts_implementation=implementation)
        for layer in model.model.layers:
            experts = layer.mlp.experts
            experts.num_experts = 8
            experts.gate_up_proj = nn.Parameter(torch.empty(8, 28672, 4096))
            experts.down_proj = nn.Parameter(torch.empty(8, 4096, 14336))
    found = hinted(model, routed(16384, 4096, device="meta"), degree=8)
    assert found.layouts[f"{_EXPERTS.format(1)}.gate_up_proj"] == Layout(1, (14336, 14336))
    assert found.layouts[f"{_EXPERTS.format(1)}.down_proj"] == Layout(2, (14336,))


# ---- written by hand ----


@pytest.mark.parametrize("degree", [2, 3])
def test_a_loop_over_a_list_of_experts_with_its_router(degree: int) -> None:
    found = plan(Mixture(), tokens(), degree)
    assert found.refused == {}
    assert found.layouts == mixture_layouts(48)
    assert found.regions[0].outputs == {True: ("sum", "same"), False: ("sum", "same")}
    assert found.regions[0].error < 1e-12


def test_an_expert_for_all_is_cut_with_the_others() -> None:
    assert plan(Mixture(shared=True), tokens()).layouts == mixture_layouts(48, shared=True)


def test_what_is_returned_in_training_alone() -> None:
    (region,) = plan(Mixture(balance=True), tokens()).regions
    assert region.outputs == {True: ("sum", "same", "same"), False: ("sum", "same")}


class Leaves(Mixture):
    """Leaves its balance loss in an attribute of its router; without a gradient, or in a list, if told so."""

    def __init__(self, *, detached: bool = False, listed: bool = False) -> None:
        super().__init__(balance=True)
        self.detached = detached
        self.losses: list[Tensor] | None = [] if listed else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        out, logits, *balance = super().forward(x)
        for loss in balance:
            self.router.loss = loss.detach() if self.detached else loss
            if self.losses is not None:
                self.losses.append(self.router.loss)
        return out, logits


def test_gradients_do_not_leave_by_attributes() -> None:
    reason = "it leaves a tensor with a gradient in its attribute 'router.loss', which it would have to return"
    found = plan(Leaves(), tokens())
    assert found.regions == ()
    assert reason in found.refused["moe"]
    assert "it fills a list" in plan(Leaves(detached=True, listed=True), tokens()).refused["moe"]
    assert plan(Leaves(detached=True), tokens()).layouts == mixture_layouts(48)


def test_dropout_inside_experts_does_not_count() -> None:
    assert plan(Mixture(drop=0.5), tokens()).layouts == mixture_layouts(48)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("sized", [False, True])
def test_stacked_experts_with_gate_and_up_side_by_side_or_in_turn(in_turn: bool, sized: bool) -> None:
    found = plan(Stacked(in_turn=in_turn, sized=sized), named())
    if sized:
        assert found.regions == ()
        assert "does not run on a part of its weights" in found.refused["moe"]
        return
    segments = (96,) if in_turn else (48, 48)
    assert found.layouts == {
        "moe.gate_up": Layout(1, segments),
        "moe.gate_up_bias": Layout(1, segments),
        "moe.down": Layout(2, (48,)),
    }


@pytest.mark.parametrize(
    ("module", "sample", "degree", "reason"),
    [
        (Mixture(bias=True), tokens(), 2, "do not add up to the whole (relative error"),
        (Mixture(bias=True), tokens(), 2, "replicated in it: router.weight, experts.*.w2.bias"),
        (Mixture(softmax=True), tokens(), 2, "what follows them does more than add up"),
        (Mixture(inner=49), tokens(), 2, "2 ranks do not divide its 49 features"),
        (Stacked(), named(), 5, "5 ranks do not divide its 48|48 and 48 features"),
        (Stacked(writes=True), named(), 2, "it writes to its inputs"),
        (nn.LayerNorm(8), CallSample(args=(torch.empty(3, 8),)), 2, "no pair of weights"),
        (nn.Linear(8, 8), CallSample(args=(torch.empty(3, 9),)), 2, "does not run on random values (mat1 and mat2"),
    ],
)
def test_refusals_have_a_reason(module: nn.Module, sample: CallSample, degree: int, reason: str) -> None:
    found = plan(module, sample, degree)
    assert found.regions == ()
    assert reason in found.refused["moe"]


class Extra(Mixture):
    """Returns a number more, and another one where only a part of its weights is there."""

    def __init__(self, whole: float, part: float) -> None:
        super().__init__()
        self.numbers = {True: whole, False: part}
        self.widest = 0

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        width = self.experts[0].w2.weight.shape[1]
        self.widest = max(self.widest, width)
        return *super().forward(x), torch.tensor(self.numbers[width == self.widest])


@pytest.mark.parametrize(
    ("whole", "part", "reason"),
    [
        (0.0, 0.0, "an output of it holds nothing but zeros on random values"),
        (math.nan, math.nan, "an output of it is not finite on random values"),
        (1.0, math.nan, "do not add up to the whole (relative error inf)"),
    ],
)
def test_outputs_of_which_nothing_can_be_learned(whole: float, part: float, reason: str) -> None:
    assert plan(Extra(1.0, 1.0), tokens()).refused == {}
    assert reason in plan(Extra(whole, part), tokens()).refused["moe"]


class Scaled(nn.Module):
    """Its gradient is not that of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 48, bias=False), nn.Linear(48, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.up(x).relu()
        # The same value in every run; the mean runs over what a rank has.
        inside = inside + (inside - inside.detach()) * inside.detach().mean()
        found: Tensor = self.down(inside)
        return found


def test_outputs_alone_are_no_proof() -> None:
    assert "the gradient of" in plan(Scaled(), CallSample(args=(torch.empty(9, HIDDEN),))).refused["moe"]


def test_planning_leaves_the_module_and_randomness_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    module = Mixture(drop=0.5)
    module.experts.eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    state = torch.get_rng_state()
    assert plan(module, tokens()).regions
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert seeds == []
    assert module.training
    assert not module.experts.training
    assert not module.experts[0].drop.training


# ---- which modules ----


def model_of(*names: str) -> nn.ModuleDict:
    return nn.ModuleDict({name: Mixture(16) for name in names})


def test_a_list_of_experts_stands_for_the_module_that_calls_them() -> None:
    found = region_candidates(model_of("a", "b"), Overrides(), ["a.experts"], ["b", "a", "b.experts.0"])
    assert [candidate.module for candidate in found] == ["a", "b", "b.experts.0"]
    assert region_candidates(nn.ModuleList([nn.ModuleDict()]), Overrides(), ["0"]) == ()


def test_the_user_goes_first_and_is_told_if_it_cannot_be() -> None:
    model = nn.ModuleDict({"good": Mixture(16), "bad": Mixture(16, bias=True)})
    calls = {"good": tokens(), "bad": tokens()}
    table = parameter_table(model)
    overrides = plan_overrides(model, table, {"good": "local"}, 2)
    candidates = region_candidates(model, overrides, ["bad"], ["good"])
    assert [candidate.module for candidate in candidates] == ["good", "bad"]
    found = plan_regions(model, table, candidates, calls, 2)
    assert [region.module for region in found.regions] == ["good"]
    assert list(found.refused) == ["bad"]
    overrides = plan_overrides(model, table, {"*": "local"}, 2)
    with pytest.raises(PlanError, match=r"tensor_plan\['\*'\]='local' cannot be exact for bad: its outputs"):
        plan_regions(model, table, region_candidates(model, overrides), calls, 2)


def test_modules_of_one_form_share_a_call_and_what_is_not_called_is_refused() -> None:
    model = nn.ModuleDict({"a": Mixture(16), "b": Mixture(16), "c": Mixture(32)})
    candidates = [Candidate(module=name) for name in model]
    found = plan_regions(model, parameter_table(model), candidates, {"a": tokens()}, 2)
    assert [region.module for region in found.regions] == ["a", "b"]
    assert found.refused == {"c": "the step does not call it"}


def test_a_region_holds_no_other() -> None:
    model = model_of("a")
    candidates = [Candidate(module=name) for name in ("a.experts.1", "a", "a.experts.2")]
    calls = {"a": tokens(), "a.experts.1": CallSample(args=(torch.empty(5, HIDDEN),))}
    found = plan_regions(model, parameter_table(model), candidates, calls, 2)
    assert [region.module for region in found.regions] == ["a.experts.1", "a.experts.2"]


def test_weights_that_others_use_or_that_the_user_replicates_stay_whole() -> None:
    model = model_of("a", "b")
    model["a"].experts[1].w2.weight = model["b"].experts[1].w2.weight
    table = parameter_table(model)
    found = plan_regions(model, table, [Candidate(module="a")], {"a": tokens()}, 2)
    assert "no pair of weights" in found.refused["a"]
    model = model_of("a")
    table = parameter_table(model)
    found = plan_regions(
        model, table, [Candidate(module="a")], {"a": tokens()}, 2, replicated={"a.experts.0.w1.weight"}
    )
    assert "no pair of weights" in found.refused["a"]


def test_layouts_go_by_first_names_also_of_weights_tied_inside() -> None:
    model = model_of("a")
    model["a"].experts[1] = model["a"].experts[0]
    (region,) = plan_regions(model, parameter_table(model), [Candidate(module="a")], {"a": tokens()}, 2).regions
    firsts = {row.name for row in parameter_table(model).rows}
    assert set(region.layouts) < firsts
    assert region.layouts["a.experts.0.w2.weight"] == Layout(1, (16,))


def test_plans_are_printed_and_travel() -> None:
    found = plan(Mixture(), tokens())
    assert pickle.loads(pickle.dumps(found)) == found
    assert str(found.regions[0]).startswith(
        "moe: local region (experts.*.w1.weight dim 0, experts.*.w1.bias dim 0, experts.*.w3.weight dim 0, "
    )
    assert isinstance(found.layouts, Mapping)
