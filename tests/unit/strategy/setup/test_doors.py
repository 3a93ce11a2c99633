from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from lightning_3d.strategy.setup.doors import ModuleDoors


class Logs(L.LightningModule):
    """Keeps what reaches the class's own methods."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.logged: list[tuple[str, Any, dict[str, Any]]] = []

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]
        self.logged.append((name, value, options))

    def toggle_optimizer(self, optimizer: Any) -> None:
        optimizer.requires_grad_(False)

    def untoggle_optimizer(self, optimizer: Any) -> None:
        optimizer.requires_grad_(True)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_pending_values_are_logged_whole(mesh: DeviceMesh) -> None:
    module = Logs()
    doors = ModuleDoors(module)
    doors.open()
    module.log("norm", DTensor.from_local(torch.tensor(3.0), mesh, [Partial()]), on_step=True)
    module.log("plain", 1.0)
    assert [(name, float(value), options) for name, value, options in module.logged] == [
        ("norm", 3.0, {"on_step": True}),
        ("plain", 1.0, {}),
    ]
    assert not isinstance(module.logged[0][1], DTensor)
    doors.close()
    assert "log" not in vars(module)


def test_a_copy_of_the_module_logs_for_itself() -> None:
    module = Logs()
    doors = ModuleDoors(module)
    doors.open()
    doors.open()
    other = copy.deepcopy(module)
    other.log("a", 1)
    assert (len(module.logged), len(other.logged)) == (0, 1)
    doors.close()
    assert not {"log", "toggle_optimizer", "untoggle_optimizer"} & vars(module).keys()


def test_gathered_parameters_follow_what_is_toggled() -> None:
    module = Logs()
    resting, gathered = module.layer.weight, nn.Parameter(torch.ones(4, 2))
    doors = ModuleDoors(module)
    doors.open()
    module.layer._parameters["weight"] = gathered
    module.toggle_optimizer(resting)
    assert gathered.requires_grad is False
    module.untoggle_optimizer(resting)
    assert gathered.requires_grad is True
    doors.close()
