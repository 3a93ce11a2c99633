"""A module's life: where its weights come from, what it is after a run, and what is refused before anything starts."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter, ModelSummary
from lightning.pytorch.callbacks.spike import SpikeDetection
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_3d import Mesh3DPrecision
from lightning_3d.errors import ConfigError, MeshError, ModuleError
from tests.parity.measure import whole
from tests.parity.models import SequenceClassifier, conv_net
from tests.spmd.fits import loader, share, trainer
from tests.spmd.pool import run_spmd
from tests.spmd.toys import CLASSES, WIDTH, Plain, classified

pytestmark = pytest.mark.spmd

BATCHES = classified(3, 4)


def fitted(rank: int, world: int, module: LightningModule, strategy: Any, batches: Any = BATCHES) -> Any:
    run = trainer(
        world,
        strategy=strategy,
        plugins=Mesh3DPrecision("64-true"),
        max_epochs=1,
        use_distributed_sampler=False,
    )
    run.fit(module, loader(share(batch, rank, world) for batch in batches))
    return run


# ---- built in __init__ ----


class Start(L.Callback):
    """Weights when training starts."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.weights = whole(dict(pl_module.named_parameters()))


def different(rank: int, world: int, stages: tuple[int, ...]) -> list[dict[str, Tensor]]:
    found = []
    for stage in stages:
        torch.manual_seed(rank)
        module, start = Plain(), Start()
        mine = whole(dict(module.named_parameters()))
        run = trainer(world, start, strategy={"zero_stage": stage}, max_epochs=1, use_distributed_sampler=False)
        run.fit(module, loader([(inputs.float(), targets) for inputs, targets in BATCHES]))
        found += [mine, start.weights]
    return found


def test_weights_of_the_first_rank_win() -> None:
    first, second = run_spmd(different, 2, (0, 1, 3))
    for index in range(0, len(first), 2):
        built, others = first[index], second[index]
        assert any(not torch.equal(built[name], others[name]) for name in built)
        for rank in (first, second):
            assert all(torch.equal(rank[index + 1][name], built[name]) for name in built)


# ---- built in configure_model ----


class Configured(LightningModule):
    """Builds its model when the mesh is there."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = self.build()

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("train_loss", loss, sync_dist=True, on_step=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ConfiguredEncoder(Configured):
    def build(self) -> nn.Module:
        return SequenceClassifier()


class ConfiguredImages(Configured):
    def build(self) -> nn.Module:
        return conv_net()


def _configured_batches(make: type[Configured]) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    targets = torch.randint(0, CLASSES, (4,), generator=generator)
    if make is ConfiguredEncoder:
        return [(torch.randint(0, 96, (4, 5), generator=generator), targets)]
    shape = (4, 3, 8, 8) if make is ConfiguredImages else (4, WIDTH)
    return [(torch.randn(shape, generator=generator), targets)]


def configured(rank: int, world: int, stages: tuple[int, ...]) -> list[Any]:
    found = []
    for make in (Configured, ConfiguredEncoder, ConfiguredImages):
        for stage in stages:
            L.seed_everything(7, verbose=False)
            module, start = make(), Start()
            run = trainer(
                world,
                start,
                strategy={"zero_stage": stage, "num_microbatches": 2 // world},
                max_epochs=1,
                use_distributed_sampler=False,
            )
            run.fit(module, loader(share(batch, rank, world) for batch in _configured_batches(make)))
            strategy: Any = run.strategy
            found.append((start.weights, float(run.callback_metrics["train_loss"]), strategy.full_state_dict()))
    return found


def test_configured_modules_begin_alike_on_every_mesh() -> None:
    one = run_spmd(configured, 1, (1,))[0]
    for found in run_spmd(configured, 2, (0, 2, 3)):
        for index, (weights, loss, state) in enumerate(found):
            expected, expected_loss, expected_state = one[index // 3]
            assert all(torch.equal(weights[name], expected[name]) for name in expected)
            # The same masks: two micro-batches on one device, one on each of two.
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            assert state.keys() == expected_state.keys()
            for name in expected:
                torch.testing.assert_close(state[name], expected_state[name], rtol=1e-4, atol=1e-6)


# ---- after a run ----


class Scored(Plain):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)


def lived(rank: int, world: int, stages: tuple[int, ...]) -> list[Any]:
    found = []
    for stage in stages:
        torch.manual_seed(0)
        module = Scored()
        run = fitted(rank, world, module, {"zero_stage": stage})
        mine = [share(batch, rank, world) for batch in BATCHES]
        first = run.test(module, loader(mine), verbose=False)[0]["test_loss"]
        run.fit_loop.max_epochs = 3
        run.fit(module, loader(mine))
        strategy: Any = run.strategy
        state = strategy.full_state_dict()
        fresh = Scored().double()
        fresh.load_state_dict(state)
        other = run.test(fresh, loader(mine), verbose=False)[0]["test_loss"]
        found.append((first, other, whole(state)))
    return found


def test_fit_test_fit_and_another_module_on_one_trainer() -> None:
    one = run_spmd(lived, 1, (0,))[0][0]
    for found in run_spmd(lived, 2, (0, 1, 3)):
        for first, other, state in found:
            assert first == pytest.approx(one[0], rel=1e-9)
            assert other == pytest.approx(one[1], rel=1e-9)
            assert other < first
            for name, value in one[2].items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


# ---- refusals ----


class Early(Plain):
    """Makes its optimizer too early."""

    def __init__(self) -> None:
        super().__init__()
        self.early = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.early


class Shards(Configured):
    def build(self) -> nn.Module:
        return fully_shard(nn.Linear(WIDTH, CLASSES), mesh=init_device_mesh("cpu", (self.trainer.world_size,)))


def cut(rank: int, world: int) -> LightningModule:
    module = Plain()
    mesh = init_device_mesh("cpu", (world,))
    module.model.head.weight = nn.Parameter(distribute_tensor(module.model.head.weight.detach(), mesh))
    return module


def wrapped(rank: int, world: int) -> LightningModule:
    module = Plain()
    module.model = DistributedDataParallel(module.model)
    return module


def used(rank: int, world: int) -> LightningModule:
    module = Plain()
    fitted(rank, world, module, {"zero_stage": 1})
    return module


def refused(rank: int, world: int, make: Any, message: str) -> None:
    module = make() if isinstance(make, type) else make(rank, world)
    with pytest.raises(ModuleError, match=message):
        fitted(rank, world, module, {"zero_stage": 1})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (cut, r"'model.head.weight' is a DTensor(?s:.*)remove"),
        (wrapped, r"'model' is wrapped in DistributedDataParallel(?s:.*)remove"),
        (Shards, r"'model' is sharded already(?s:.*)remove the fully_shard call"),
        (used, r"is sharded already(?s:.*)new module"),
        (Early, r"optimizer 0 \(SGD\) holds 18 parameters(?s:.*)configure_optimizers"),
    ],
    ids=["dtensor", "ddp", "fully_shard", "another trainer's", "early optimizer"],
)
def test_modules_that_cannot_be_cut_are_refused(make: Any, message: str) -> None:
    run_spmd(refused, 2, make, message)


def beside(rank: int, world: int) -> float:
    fitted(rank, world, Plain(), {"zero_stage": 2})
    torch.manual_seed(0)
    module = Plain()
    run = trainer(world, strategy="ddp", max_epochs=1, use_distributed_sampler=False)
    run.fit(module, loader((inputs.float(), targets) for inputs, targets in BATCHES))
    assert not [name for name in vars(module) if "mesh_3d" in name]
    return float(run.callback_metrics["train_loss"])


def test_lightnings_own_strategy_works_beside_it() -> None:
    first, second = run_spmd(beside, 2)
    assert first == second


# ---- bad input: before any process meets another ----


def impossible(rank: int, world: int) -> None:
    cases: tuple[tuple[type[Exception], str, dict[str, Any]], ...] = (
        (MeshError, "3", {"data_parallel_size": 3}),
        (ConfigError, "zero_stage=5 must be", {"zero_stage": 5}),
        (ConfigError, "data_replicate_size=3", {"data_parallel_size": 2, "data_replicate_size": 3}),
        (ConfigError, "num_microbatches=0", {"num_microbatches": 0}),
        (TypeError, "zero_stag", {"zero_stag": 1}),
    )
    for error, message, options in cases:
        with pytest.raises(error, match=message):
            trainer(world, strategy=options)
    assert not torch.distributed.is_initialized()


def test_impossible_options_are_errors_before_any_collective() -> None:
    run_spmd(impossible, 2, process_group=False)


# ---- after a run ----


_METHODS = frozenset({"_summary", "write_on_batch_end", "write_on_epoch_end", "on_train_batch_end"})


class Shown(Plain):
    """Has an example for summaries."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = BATCHES[0][0]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)


def callbacks_changed(rank: int, world: int, strategy: dict[str, Any], *callbacks: Callback) -> list[set[str]]:
    """The methods that a training has given to callbacks, while it ran and after it."""

    class Looks(Callback):
        def on_train_end(self, *args: Any) -> None:
            found.append(changed())

    def changed() -> set[str]:
        return {name for each in callbacks for name in _METHODS & vars(each).keys()}

    found: list[set[str]] = []
    module = Shown()
    run = trainer(world, *callbacks, Looks(), strategy=strategy, precision="64-true", max_epochs=1)
    run.fit(module, loader(BATCHES))
    return [*found, changed()]


class Writes(BasePredictionWriter):
    """A writer of predictions."""


def test_callbacks_are_their_own_after_a_run() -> None:
    cut = run_spmd(callbacks_changed, 2, {"pipeline_parallel_size": 2}, ModelSummary(), Writes("batch"))
    shown = {"_summary"}
    assert cut == [[shown, set()], [shown | {"write_on_batch_end", "write_on_epoch_end"}, set()]]
    data = run_spmd(callbacks_changed, 2, {}, SpikeDetection())
    assert data == [[{"on_train_batch_end"}, set()]] * 2
