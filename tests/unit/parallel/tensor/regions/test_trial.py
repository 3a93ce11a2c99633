from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.parallel.tensor.regions.pairs import Pair, find_pairs
from lightning_3d.parallel.tensor.regions.trial import CallSample, NoTrial, Scale, Trial, trials
from lightning_3d.shards.layout import Layout


class Gated(nn.Module):
    def __init__(self, hidden: int, inner: int, view: int | None = None) -> None:
        super().__init__()
        self.packed = nn.Linear(hidden, 2 * inner)
        self.down = nn.Linear(inner, hidden)
        self.register_buffer("scale", torch.ones(inner))
        self.view = view

    def forward(self, x: Tensor, options: SimpleNamespace | None = None) -> Tensor:
        gate, up = self.packed(x).chunk(2, -1)
        inside = gate.sigmoid() * up
        if self.view is not None:
            inside = inside.view(*x.shape[:-1], self.view)
        found: Tensor = self.down(inside)
        return found


def sample(*shape: int) -> CallSample:
    return CallSample(args=(torch.empty(shape, device="meta"),))


def first(module: nn.Module, call: CallSample, degree: int = 2) -> Trial:
    return next(trials(module, call, degree))


def shapes(trial: Trial) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in trial.weights.items()}


def test_dims_keep_their_ratio_and_what_divides_them() -> None:
    with torch.device("meta"):
        module = Gated(4096, 14336)
    module.scale = torch.ones(1)
    trial = first(module, sample(3, 2048, 4096), degree=4)
    assert shapes(trial)["packed.weight"] == (2 * 28, 8)
    assert shapes(trial)["down.weight"] == (8, 28)
    assert trial.run().outputs[0].shape == (3, 12, 8)
    assert trial.weights["down.bias"].dtype is torch.float64


def test_code_that_counts_on_sizes_is_tried_at_its_size() -> None:
    trial = first(Gated(64, 96, view=96), sample(2, 40, 64))
    assert shapes(trial)["down.weight"] == (64, 96)
    assert trial.run().outputs[0].shape == (2, 12, 64)


def test_what_cannot_be_tried_says_why() -> None:
    with torch.device("meta"):
        large = Gated(16384, 65536, view=65536)
    with pytest.raises(NoTrial, match=r"shape.*12 GiB of weights are too much to try it out"):
        first(large, sample(4, 16384))
    with pytest.raises(NoTrial, match="does not run on random values"):
        first(Gated(32, 32), sample(4, 5))


def test_runs_are_equal_and_leave_no_gradient() -> None:
    module = Gated(32, 64)
    trial = Trial(module, sample(5, 32), Scale(), torch.float64, 2)
    one, other = trial.run(), trial.run()
    assert torch.equal(one.outputs[0], other.outputs[0])
    gradients, others = one.gradients([1.0])[1], other.gradients([1.0])[1]
    assert all(torch.equal(value, others[name]) for name, value in gradients.items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_gradients_of_nothing() -> None:
    trial = Trial(nn.Flatten(), CallSample(args=(torch.ones(2, 3, dtype=torch.int64),)), Scale(), torch.float64, 2)
    with pytest.raises(NoTrial, match="no gradient leaves it"):
        trial.run().gradients([1.0])


def test_arguments_that_are_no_tensors_are_handed_on() -> None:
    seen = []
    module = Gated(32, 64)
    module.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["options"]), with_kwargs=True)
    options = SimpleNamespace()
    Trial(module, CallSample(args=sample(5, 32).args, kwargs={"options": options}), Scale(), torch.float64, 2).run()
    assert seen == [options]


def test_a_hidden_unit_is_found_in_all_weights_that_hold_a_part_of_it() -> None:
    module = Gated(8, 24)
    module.scale = torch.ones(24)
    found = find_pairs(Trial(module, sample(6, 8), Scale(), torch.float64, 2))
    layouts = {
        "down.weight": Layout(1, (24,)),
        "packed.weight": Layout(0, (24, 24)),
        "packed.bias": Layout(0, (24, 24)),
    }
    assert found[0] == Pair(layouts, 8 * 24 + 48 * 8 + 48)


def test_what_is_not_linear_in_the_end_has_no_pair() -> None:
    module = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8), nn.Softmax(-1))
    assert find_pairs(Trial(module, sample(6, 8), Scale(), torch.float64, 2)) == ()
