"""Features of where data comes from: workers, a LightningDataModule with its hooks, loaders that keep their place."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import default_collate

from tests.features.here import Here
from tests.features.modules import Data, Module, Samples, metrics, weights
from tests.features.seeing import Sees, all_batches, of_data_ranks
from tests.features.table import Feature, Seen

# ---- workers ----


class Augmented(Samples):
    """Adds noise of all generators; of the second input each sample shows which."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = super().__getitem__(index)
        noise = 0.01 * (float(torch.rand(())) + random.random() + np.random.rand())
        return torch.cat([inputs[:1], inputs.new_tensor([noise]), inputs[2:]]), target


class Noises(Callback):
    """Writes down the noise of every sample."""

    def __init__(self) -> None:
        self.noises: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.noises += batch[0][:, 1].tolist()


def _augmented(here: Here, **options: Any) -> Seen:
    L.seed_everything(5, workers=True, verbose=False)
    sees, noises = Sees(), Noises()
    trainer = here.trainer(sees, noises, max_epochs=2)
    trainer.fit(Module(), here.loader(Augmented(16), 8, shuffle=True, num_workers=2, **options))
    every = [noise for hand in of_data_ranks(here, noises.noises) for noise in hand]
    return {"batches": all_batches(here, sees), "samples": len(every), "different": len(set(every))}


def workers(here: Here) -> Seen:
    return {"new in each epoch": _augmented(here), "kept": _augmented(here, persistent_workers=True)}


# ---- a data module ----


class Hooked(Data):
    """Has every hook, and writes down when it is called and with what."""

    def __init__(self, here: Here) -> None:
        super().__init__(here, samples=16)
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        # On each machine once.
        with (self.here.directory / "prepared").open("a") as file:
            file.write("once\n")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("before")
        inputs, targets = batch
        return {"inputs": inputs, "targets": targets}

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.calls.append("transfer")
        assert set(batch) == {"inputs", "targets"}
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("after")
        return 2 * batch["inputs"], batch["targets"]


def data_module(here: Here) -> Seen:
    trainer, module, data = here.trainer(), Module(), Hooked(here)
    trainer.fit(module, data)
    fitted = metrics(trainer)
    trainer.test(module, data, verbose=False)
    trainer.predict(module, data)
    return {
        "prepared": (here.directory / "prepared").read_text().splitlines()[: trainer.num_nodes],
        "calls": data.calls,
        "fitted": fitted,
        "tested": metrics(trainer),
        "weights": weights(trainer),
    }


class HookedModule(Module):
    """Has the hooks of transfers, and its own loaders."""

    def __init__(self, here: Here) -> None:
        super().__init__()
        self.here = here
        self.calls: list[str] = []

    def train_dataloader(self) -> Any:
        self.calls.append("train loader")
        return Stateful(self.here)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.calls.append("after")
        batch[0].mul_(2)
        return batch


def hooks_of_module(here: Here) -> Seen:
    trainer, module = here.trainer(max_epochs=2), HookedModule(here)
    trainer.fit(module)
    return {"calls": module.calls, "metrics": metrics(trainer), "weights": weights(trainer)}


# ---- loaders that keep their place ----


class Stateful:
    """A loader of one's own that goes on where it was saved.

    Args:
        here: Which part of each batch is this rank's.
    """

    def __init__(self, here: Here) -> None:
        self.samples, self.at = Samples(48), 0
        self.size = 8 // here.mesh.data
        self.first = self.size * (here.rank * here.mesh.data // here.mesh.world)

    def __len__(self) -> int:
        return len(self.samples) // 8

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self):
            begin = 8 * self.at + self.first
            self.at += 1
            yield default_collate([self.samples[index] for index in range(begin, begin + self.size)])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _resumed(here: Here, make: Callable[[], Any]) -> Seen:
    begun, sees = Sees(), Sees()
    # In fp64 from the start: one device loads a checkpoint before it converts the module.
    first = here.trainer(begun, max_steps=2)
    first.fit(Module().double(), make())
    first.save_checkpoint(here.directory / "saved.ckpt")
    then = here.trainer(sees, max_steps=9)
    then.fit(Module().double(), make(), ckpt_path=str(here.directory / "saved.ckpt"))
    return {
        "begun": all_batches(here, begun),
        "batches": all_batches(here, sees),
        "metrics": metrics(then),
        "weights": weights(then),
    }


def stateful_loader(here: Here) -> Seen:
    return _resumed(here, lambda: Stateful(here))


def resumed_inside_an_epoch(here: Here) -> Seen:
    def make() -> Any:
        # Torch's own is on a mesh where the checkpoint was written, and on one device where it happens to be.
        generator = torch.Generator().manual_seed(3)
        return here.loader(Samples(32), 8, shuffle=True, generator=generator)

    return _resumed(here, make)


FEATURES: tuple[Feature, ...] = (
    Feature(name="augmentation in workers, persistent_workers", program=workers, options={"check_replicas": True}),
    Feature(name="LightningDataModule, all hooks", program=data_module),
    Feature(name="loaders and transfer hooks of the module", program=hooks_of_module),
    Feature(name="loaders that keep their place", program=stateful_loader),
    Feature(name="resuming inside an epoch, shuffle=True", program=resumed_inside_an_epoch),
)
