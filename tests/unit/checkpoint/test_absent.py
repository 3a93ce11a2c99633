from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.checkpoint.absent import AbsentTensor, is_absent, present, stand_in
from lightning_3d.checkpoint.layout import as_saved, module_state
from lightning_3d.errors import CheckpointError
from lightning_3d.shards.absent import form_of


def absent(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return stand_in(nn.Parameter(torch.empty(*shape, dtype=dtype, device="meta")))


def test_it_has_a_form_and_no_values() -> None:
    tensor = absent(2, 3)
    assert is_absent(tensor)
    assert isinstance(tensor, AbsentTensor)
    assert not tensor.is_meta
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((2, 3), torch.float32, "cpu")
    assert form_of(tensor).is_meta
    assert is_absent(form_of(tensor))
    assert not is_absent(torch.ones(1))
    assert repr(tensor) == "AbsentTensor((2, 3), torch.float32)"


def test_hooks_compute_with_it() -> None:
    tensor = absent(2, 3)
    for found, shape, dtype in (
        (tensor.cpu().clone().detach(), (2, 3), torch.float32),
        (tensor.half(), (2, 3), torch.float16),
        (tensor.to("cpu", torch.float64), (2, 3), torch.float64),
        (tensor * 2 + torch.ones(3), (2, 3), torch.float32),
        (torch.cat([tensor, torch.zeros(1, 3)]), (3, 3), torch.float32),
        (tensor.full_tensor().t()[0], (2,), torch.float32),
        (torch.zeros_like(tensor), (2, 3), torch.float32),
        (tensor.chunk(2)[1], (1, 3), torch.float32),
    ):
        assert isinstance(found, AbsentTensor)
        assert (found.shape, found.dtype) == (shape, dtype)
    assert tensor.mul_(2) is tensor
    assert tensor.copy_(torch.ones(2, 3)) is tensor


@pytest.mark.parametrize(
    "use",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: bool(tensor.isnan().any()),
        lambda tensor: torch.zeros(2, 3).copy_(tensor),
        lambda tensor: tensor @ tensor,
    ],
    ids=["item", "bool", "copy", "shapes"],
)
def test_what_needs_values_is_refused(use: object) -> None:
    with pytest.raises(CheckpointError, match="another pipeline rank") as caught:
        use(absent(2, 3))  # type: ignore[operator]
    assert "strategy.full_tensor(name, tensor)" in str(caught.value)


def test_it_is_copied_and_travels() -> None:
    tensor = AbsentTensor(torch.empty(2, 3, dtype=torch.bfloat16, device="meta"), cut=True)
    for copied in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert isinstance(copied, AbsentTensor)
        assert (copied.shape, copied.dtype, copied.device) == (tensor.shape, tensor.dtype, tensor.device)
    assert pickle.loads(pickle.dumps(tensor)).cut


def test_a_module_has_all_its_names() -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3))
    module[1].weight = module[0].weight = nn.Parameter(torch.empty(3, 2, device="meta"))
    state = module_state(module)
    assert [*state] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert state["0.weight"] is state["1.weight"]
    assert [*present(state)] == ["0.bias", "1.bias"]
    assert as_saved("text", None) == "text"
