"""Scenarios for a Trainer on tensor-parallel ranks and on one device; every rank must see what one device sees."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch._subclasses import FakeTensor

from lightning_3d import Mesh3DPrecision, Mesh3DStrategy
from lightning_3d.shards.tensor import ShardTensor
from tests.parity.measure import FP64, Record, Recorder, compare
from tests.parity.models import LENGTH, VOCABULARY
from tests.spmd.fits import QUIET
from tests.spmd.pool import run_spmd

_CLOSE = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Where a scenario runs.

    Attributes:
        world: Number of processes.
        strategy: Arguments of the strategy; a tensor degree is the number of processes unless it is given.
    """

    world: int
    strategy: dict[str, Any] = field(default_factory=dict)

    @property
    def cut(self) -> bool:
        """Whether anything is cut over a tensor axis."""
        return self.world > 1

    def trainer(self, *callbacks: Callback, strategy: dict[str, Any] | None = None, **options: Any) -> Trainer:
        """A quiet Trainer in fp64, whose dropout draws one device's masks."""
        degree = {"tensor_parallel_size": self.world, "tensor_random": "exact"} if self.cut else {}
        chosen = Mesh3DStrategy(**{**degree, **(self.strategy if self.cut else {}), **(strategy or {})})
        options = {"plugins": Mesh3DPrecision("64-true"), "max_epochs": 1, **QUIET, **options}
        return L.Trainer(**options, devices=self.world, strategy=chosen, callbacks=list(callbacks))

    def fit(self, module: LightningModule, *data: Any, **options: Any) -> Record:
        """Trains and returns what was recorded."""
        recorder = Recorder()
        callbacks = [recorder, *options.pop("callbacks", ())]
        self.trainer(*callbacks, **options).fit(module, *data)
        return recorder.record


Scenario = Callable[[Ranks], Any]


def seen_alike(scenario: Scenario, world: int = 2, *, timeout: float = 60, **strategy: Any) -> Any:
    """Runs a scenario on one process and on several, compares what all saw, and returns what one process saw."""
    expected = run_spmd(_see, 1, scenario, {}, timeout=timeout)[0]
    for rank, found in enumerate(run_spmd(_see, world, scenario, strategy, timeout=timeout)):
        assert_same(found, expected, f"rank {rank}")
    return expected


def _see(rank: int, world: int, scenario: Scenario, strategy: dict[str, Any]) -> Any:
    L.seed_everything(3, verbose=False)
    return scenario(Ranks(world=world, strategy=strategy))


def assert_same(found: Any, expected: Any, place: str, *, close: float = _CLOSE) -> None:
    """Compares nested values; numbers must be close, and everything else equal."""
    assert type(found) is type(expected), f"{place}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, Record):
        difference = compare(found, expected)
        assert difference.within(FP64), f"{place}: {difference}"
    elif isinstance(expected, Tensor):
        assert found.shape == expected.shape, place
        torch.testing.assert_close(found, expected, rtol=close, atol=1e-10, msg=lambda text: f"{place}: {text}")
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=close, abs_tol=1e-12), f"{place}: {found} instead of {expected}"
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), place
        for key, value in expected.items():
            assert_same(found[key], value, f"{place}, {key}", close=close)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), place
        for index, value in enumerate(expected):
            assert_same(found[index], value, f"{place}, {index}", close=close)
    else:
        assert found == expected, f"{place}: {found} instead of {expected}"


def of_one_kind(value: Any) -> Any:
    """Returns nested values with plain dicts for all that are dicts."""
    return {key: of_one_kind(part) for key, part in value.items()} if isinstance(value, dict) else value


def tokens(count: int, samples: int = 4, length: int = LENGTH) -> list[tuple[Tensor]]:
    """The same batches of tokens everywhere."""
    generator = torch.Generator().manual_seed(9)
    return [(torch.randint(0, VOCABULARY, (samples, length), generator=generator),) for _ in range(count)]


def is_cut(value: object) -> bool:
    """Whether a value is cut over the tensor-parallel ranks."""
    return isinstance(value, ShardTensor)


def plain(value: Any) -> Tensor:
    """A copy of a tensor that must be an ordinary one, but for the step that a plan is made from."""
    assert type(value) in (Tensor, FakeTensor), type(value)
    return value.detach().clone()
