"""A step in stages gives what it gives on one process, and so does code that runs on all stages together."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_3d.errors import ModuleError
from lightning_3d.parallel.pipeline.run.placeholder import resolve
from tests.parity.catalog import build, global_batches
from tests.spmd.pool import run_spmd
from tests.spmd.stage_chain import Cut, check_parity, inside, whole
from tests.spmd.stage_nets import BLOCKS, WIDTH, tangled

pytestmark = pytest.mark.spmd


def of_catalog(name: str) -> tuple[L.LightningModule, Any]:
    module = build(name).double().train()
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    return module, global_batches(name, 1, 4, torch.float64)[0]


def parity(rank: int, world: int, name: str, options: dict[str, Any]) -> list[str]:
    # Some models compute in fp32 inside, whatever the precision.
    return check_parity(rank, world, partial(of_catalog, name), 1e-6 if "HF" in name else 1e-12, **options)


@pytest.mark.parametrize(
    "name",
    [
        "HF Llama, 8 blocks",
        "HF GPT-2 (tied), 8 blocks",
        "HF T5, 4 + 4 blocks",
        "HF Mixtral, router losses, 8 blocks",
        "nn.TransformerEncoder, 8 blocks",
        "U-Net skips, 8 blocks",
    ],
)
def test_step_in_two_stages_is_the_step_of_one_process(name: str) -> None:
    first, second = run_spmd(parity, 2, name, {})
    assert first == second


@pytest.mark.parametrize("options", [{}, {"pipeline_schedule": "interleaved1f1b"}])
def test_step_that_is_hard_to_cut_is_the_step_of_one_process(options: dict[str, Any]) -> None:
    first, second = run_spmd(tangled_parity, 2, options)
    assert first == second


def tangled_parity(rank: int, world: int, options: dict[str, Any]) -> list[str]:
    return check_parity(rank, world, tangled, 1e-12, **options)


def run_shared(rank: int, world: int) -> dict[str, Any]:
    module, batch = tangled()
    cut = Cut.of(module, batch, rank, world)
    module.eval()
    reference, _ = tangled()
    reference.eval()
    with inside(cut.streams):
        output = cut.runs.shared(lambda: module(batch))
    with inside(cut.streams):
        torch.testing.assert_close(output, reference(batch).detach(), rtol=0, atol=0)
    assert len(module.left) == 1, "hooks are called on ranks that did not compute"
    torch.testing.assert_close(module.left[0], reference.left[0], rtol=0, atol=0)
    # A single part, called by a hook.
    states = torch.ones(1, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    single = module.blocks[3](states)
    torch.testing.assert_close(single, reference.blocks[3](states).detach(), rtol=0, atol=0)
    assert not single.requires_grad
    messages = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shape") as failure:
            module.blocks[3](states[..., :-1])
        messages.append(str(failure.value))
    return {"messages": messages, "device": str(cut.runs.shared(lambda: module.position.device))}


def test_code_on_all_stages_together_gives_what_it_gives_on_one_process() -> None:
    first, second = run_spmd(run_shared, 2)
    assert first == second
    assert first["device"] == "cpu"


def generated(rank: int, world: int, options: dict[str, Any]) -> list[int]:
    name = "HF Llama, 8 blocks"
    module, batch = of_catalog(name)
    cut = Cut.of(module, batch, rank, world)
    reference, batch = of_catalog(name)
    for each in (module, reference):
        each.eval()
    ids = batch[0][:2, :5]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, **options}
    expected = reference.model.generate(ids, **options)
    # Inside of one run, and with a run for each call of a part.
    assert torch.equal(cut.runs.shared(lambda: module.model.generate(ids, **options)), expected)
    with torch.inference_mode():
        assert torch.equal(module.model.generate(ids, **options), expected)
    return expected.flatten().tolist()


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"cache_implementation": "static"}])
def test_generate_on_all_stages_together(options: dict[str, Any]) -> None:
    first, second = run_spmd(generated, 2, options)
    assert first == second


def logged(rank: int, world: int) -> None:
    module, batch = tangled()
    cut = Cut.of(module, batch, rank, world)
    record = cut.record(lambda: module.training_step(batch, 0))
    assert not module.seen, "recording leaves no trace"
    assert not module.left
    assert not module.logged
    with torch.no_grad():
        output, _ = cut.forward(record, lambda: module.training_step(batch, 0))
    reference, _ = tangled()
    loss, _ = whole(reference, lambda: reference.training_step(batch, 0), cut.plan.modules)
    if rank == cut.plan.last_rank:
        torch.testing.assert_close(output, loss)
        torch.testing.assert_close(resolve(module.logged)["norm"], reference.logged["norm"].detach())


def test_values_logged_before_a_stage_are_what_was_received_after_it() -> None:
    run_spmd(logged, 2)


def checkpointed(name: str, reentrant: bool) -> tuple[L.LightningModule, Any]:
    module, batch = of_catalog(name)
    module.model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    return module, batch


def checkpointed_parity(rank: int, world: int, reentrant: bool) -> list[str]:
    return check_parity(rank, world, partial(checkpointed, "HF GPT-2 (tied), 8 blocks", reentrant), 1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_are_run_again_in_backward(reentrant: bool) -> None:
    run_spmd(checkpointed_parity, 2, reentrant)


class BrokenError(RuntimeError):
    """An error that cannot travel."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{text} {code}")
        self.cannot_travel = lambda: None


def refusals(rank: int, world: int) -> list[str]:
    module, batch = tangled()
    cut = Cut.of(module, batch, rank, world)
    messages = []

    def refused(step: Any, text: str) -> None:
        with pytest.raises((ModuleError, RuntimeError), match=text) as failure:
            cut.record(step)
        messages.append(str(failure.value))

    def breaks(*_: Any) -> None:
        raise BrokenError(7, "broken")

    def step() -> Tensor:
        return module.training_step(batch, 0)

    def in_another_order() -> Tensor:
        h = torch.ones(2, 3, WIDTH).double()
        # The plan would refuse it too, on the second rank alone.
        for index in (1, 0, 2, 3) if rank else range(BLOCKS):
            h = module.blocks[index](h)
        return h.sum()

    refused(
        lambda: (module.scale if rank else module.scale * 1).sum() * 0 + step(), "do different things with the same"
    )
    refused(in_another_order, "do different things with the same")
    handle = module.blocks[0].register_forward_hook(lambda *_: module.blocks[3](torch.ones(1, WIDTH).double()))
    refused(step, r"blocks\.3 is called inside another module")
    handle.remove()
    handle = module.blocks[3].linear.register_forward_hook(breaks)
    refused(step, "broken 7")
    handle.remove()
    assert cut.record(step).blocks == cut.plan.blocks, "all is as before"
    return messages


def test_what_fails_on_one_rank_fails_on_all() -> None:
    first, second = run_spmd(refusals, 2)
    assert first[:3] == second[:3]
    assert (first[3], second[3]) == ("BrokenError: broken 7", "broken 7"), "what cannot travel is told"
