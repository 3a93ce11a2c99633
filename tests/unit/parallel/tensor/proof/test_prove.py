from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.errors import ModuleError, PlanError
from lightning_3d.parallel.tensor.proof import prove as proof_file
from lightning_3d.parallel.tensor.proof.cache import ProofCache
from lightning_3d.parallel.tensor.proof.prove import prove, startup_proof
from lightning_3d.parallel.tensor.proof.ranks import StepCall
from lightning_3d.parallel.tensor.proof.result import Proof, Skipped
from lightning_3d.shards.rules import contractions
from tests.parity.tensor_models import FP32_INSIDE, TENSOR_MODELS
from tests.unit.parallel.tensor.proving import Net, batch, known, planned, proved, proved_by_plan_of_net, training

# ---- what is exact ----


@pytest.mark.parametrize("name", TENSOR_MODELS)
def test_plans_of_many_models_are_exact(name: str) -> None:
    module, call = known(name)
    size = 4 if name in ("HF Llama (GQA)", "packed GPT (tied)", "SwiGLU") else 2
    found = prove(module, call, planned(module, call, size))
    assert isinstance(found, Proof)
    bound = 1e-6 if name in FP32_INSIDE else 1e-12
    assert found.value_error < bound
    assert found.error < bound
    assert found.ranks == size
    assert found.parameters >= 5


@pytest.mark.parametrize("name", ["HF Qwen3", "packed GPT (tied)", "nn.TransformerEncoder"])
def test_sequence_parallel_plans_are_exact(name: str) -> None:
    module, call = known(name)
    found = prove(module, call, planned(module, call, sequence=True))
    assert isinstance(found, Proof)
    assert found.error < 1e-12


def test_one_block_of_a_stack_is_enough() -> None:
    module = Net(blocks=5)
    found = proved(module, training(batch()))
    assert found.piece == "one block of each kind, few samples"
    assert found.parameters == 8


def test_a_step_that_counts_its_blocks_is_proved_on_all_of_them() -> None:
    class Counting(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for index in range(3):
                x = self.blocks[index](x)
            return self.last(x)

    found = proved(Counting(), training(batch()))
    assert found.piece == "all blocks, few samples"
    assert found.parameters == 16


def test_a_proof_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    class Prints(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.print("a batch of", len(x))
            return super().forward(x)

    assert proved(Prints(), training(batch())).parameters == 8
    assert capsys.readouterr().out == ""


def test_a_step_may_write_to_parameters() -> None:
    class Follows(Net):
        def __init__(self) -> None:
            super().__init__()
            self.slow = copy.deepcopy(self.blocks).requires_grad_(False)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            with torch.no_grad():
                for slow, parameter in zip(self.slow.parameters(), self.blocks.parameters(), strict=True):
                    slow.mul_(0.5).add_(parameter, alpha=0.5)
                x = self.first(batch)
                for block in self.slow:
                    x = x + block(x)
                target = self.last(x)
            return (self(batch) - target.flip(0)).square().mean()

    assert proved(Follows(), training(batch())).error < 1e-12


def test_nothing_is_changed() -> None:
    module, call = known("nn.TransformerEncoder")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    attributes = {name: dict(vars(child)) for name, child in module.named_modules()}
    plan = planned(module, call)
    batch = [value.clone() for value in call.args[0]]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    prove(module, call, plan)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(torch.equal(*pair) for pair in zip(batch, call.args[0], strict=True))
    assert all(parameter.grad is None for parameter in module.parameters())
    for name, child in module.named_modules():
        assert vars(child).keys() == attributes[name].keys()
        assert list(child._modules) == list(attributes[name]["_modules"])


def test_random_numbers_are_those_of_one_device() -> None:
    class Noisy(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            out = F.dropout(self(batch + torch.randn_like(batch)), 0.5)
            hidden = self.blocks[0][0](self.first(batch))
            return (out.square().mean() + (hidden * torch.rand_like(hidden)).mean()) * torch.rand(())

    assert proved(Noisy(), training(batch())).error < 1e-12


@pytest.mark.parametrize("method", ["validation_step", "test_step", "predict_step"])
def test_other_steps_are_proved_by_what_they_give(method: str) -> None:
    class Others(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("loss", self(batch).square().mean())

        def test_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
            logits = self(batch)
            return {"logits": logits, "classes": logits.argmax(-1)}

        def predict_step(self, batch: Tensor, batch_idx: int) -> list[Tensor]:
            return [self(batch), self.blocks[0][0](self.first(batch))]

    found = proved(Others(), StepCall(method=method, args=(batch(), 0)))
    assert found.value_error < 1e-12
    assert found.error < 1e-12
    assert found.parameters > 0


def test_a_step_without_gradients_is_proved_by_its_values() -> None:
    class Quiet(Net):
        @torch.no_grad()
        def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self(batch)

    found = proved(Quiet(), StepCall(method="predict_step", args=(batch(), 0)))
    assert found.parameter is None
    assert found.value_error < 1e-12
    assert "gradients" not in str(found)


def test_manual_optimization_is_proved_by_what_it_calls_backward_with() -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self(batch).square().mean())
            optimizer.step()

    found = proved(Manual(), training(batch()))
    assert found.parameters == 8
    assert found.error < 1e-12


def test_a_module_on_the_meta_device_gets_values() -> None:
    with torch.device("meta"):
        module, call = known("packed GPT (tied)")
    call = replace(call, args=known("packed GPT (tied)")[1].args)
    plan = planned(module, call)
    asked = []

    def values(name: str) -> Tensor:
        asked.append(name)
        return torch.ones(12, 12, dtype=torch.bool).tril() if name.endswith("causal") else torch.ones(shapes[name])

    shapes = {name: value.shape for name, value in module.named_parameters()}
    assert isinstance(prove(module, call, plan, values=values), Proof)
    assert "model.blocks.0.attention.causal" in asked
    assert isinstance(prove(module, call, plan), Proof)


def test_frozen_and_unused_parameters() -> None:
    module = Net()
    module.first.weight.requires_grad_(False)
    module.unused = nn.Linear(16, 16)
    found = proved(module, training(batch()))
    assert found.parameters == 7


def test_statistics_of_each_copy_are_its_own() -> None:
    class Normalised(Net):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(16, momentum=0.9)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.norm(self.first(batch))
            self.norm.eval()
            return self.last(self.norm(self.first(batch))).square().mean()

    assert proved_by_plan_of_net(Normalised()).error < 1e-12


def test_a_model_that_cannot_compute_in_fp64_is_proved_in_fp32() -> None:
    class Single(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float())

    found = proved(Single(), training(batch()))
    assert found.precision == "float32"
    assert 0 < found.error < 1e-4


def test_gathering_over_processes_asks_nobody() -> None:
    class Gathering(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.all_gather(self(batch), sync_grads=True).square().mean()

    assert proved_by_plan_of_net(Gathering()).error < 1e-12


def test_copies_know_their_dtype_and_device() -> None:
    class Asking(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self(batch.to(self.device, self.dtype)).square().mean()

    module = Asking()
    module._device = torch.device("meta")
    assert proved_by_plan_of_net(module).precision == "float64"
    assert module.device.type == "meta"


def test_a_loss_of_zero_is_no_error() -> None:
    class Zero(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self(batch).square().mean()
            return loss - loss.detach()

    assert proved_by_plan_of_net(Zero()).value_error < 1e-9


def test_errors_that_speak_for_themselves_are_passed_on() -> None:
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 2

    class Foreign(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return Custom.apply(self.first(batch)).square().mean()

    call = training(batch())
    with pytest.raises(ModuleError, match="Custom"):
        prove(Foreign(), call, planned(Net(), call))


# ---- what cannot be proved ----


def test_a_step_that_gives_no_numbers_is_not_proved() -> None:
    class Infinite(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self(batch).sum() * float("inf")

    call = training(batch())
    found = prove(Infinite(), call, planned(Net(), call))
    assert str(found) == (
        "not proved: the step runs on no small part of the model (it gives no finite loss, or no gradients)"
    )


def test_a_module_that_cannot_be_copied_is_not_proved() -> None:
    class Stuck(Net):
        def __deepcopy__(self, memo: object) -> None:
            raise TypeError("it holds a lock")

    call = training(batch())
    found = prove(Stuck(), call, planned(Net(), call))
    assert isinstance(found, Skipped)
    assert "TypeError: it holds a lock" in found.reason


def test_what_needs_too_much_memory_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = Net(), training(batch())
    plan = planned(module, call)
    monkeypatch.setattr(proof_file, "_MOST_BYTES", 2**10)
    found = prove(module, call, plan)
    assert isinstance(found, Skipped)
    assert found.reason.endswith("of memory, of 1.00 KiB at most")


# ---- at start-up ----


def test_a_large_model_is_not_proved_at_startup(tmp_path: Any) -> None:
    with torch.device("meta"):
        module = Net(blocks=8, width=4096)
    call = training(batch())
    found = startup_proof(module, call, planned(module, call), cache=ProofCache(tmp_path))
    assert isinstance(found, Skipped)
    assert "at start-up 1.0 s at most; `lightning-3d verify` makes it" in found.reason


def test_a_proof_is_made_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = Net(), training(batch())
    plan, cache = planned(module, call), ProofCache(tmp_path)
    first = startup_proof(module, call, plan, cache=cache)
    assert isinstance(first, Proof)
    assert not first.cached
    runs: list[Callable[..., Any]] = []
    monkeypatch.setattr(proof_file, "run_ranks", runs.append)
    second = startup_proof(module, call, plan, cache=cache)
    assert second == replace(first, cached=True)
    assert "earlier" in str(second)


def test_a_failed_proof_is_not_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, call = Net(), training(batch())
    plan = planned(module, call)
    monkeypatch.setattr(contractions, "summed", lambda partial, shard, dim=-2: partial)
    with pytest.raises(PlanError):
        startup_proof(module, call, plan, cache=ProofCache(tmp_path))
    assert not list(tmp_path.iterdir())
