"""Which loader goes on at which place."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader

from lightning_3d.strategy.data.places import LoaderPlaces, Place


def test_a_loader_of_an_evaluation_takes_no_place_of_a_training_loader() -> None:
    place = Place(random={}, order=None, generators=(), rounds=3, unit=2, ranks=1)
    trainer: Any = SimpleNamespace(state=SimpleNamespace(fn=TrainerFn.FITTING), training=False)
    loader: Any = DataLoader(range(8), batch_size=2)  # type: ignore[arg-type]
    places = LoaderPlaces(1)
    places.resume(trainer, [asdict(place)])
    assert places.follow(loader, trainer) is loader
    trainer.training = True
    assert vars(places.follow(loader, trainer))["_place"] == place
