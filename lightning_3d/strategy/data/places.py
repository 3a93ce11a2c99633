"""Where a run is in its training data: the order of the epoch and how much of it was read, for any number of ranks.

Lightning puts loaders back that say themselves where they are. For all others the random states with which an epoch
began give its order again, and what was read of it is left out: by index where samples have one, else by reading on.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset

from lightning_3d.batches.loaders import LoaderInPlace
from lightning_3d.checkpoint.generators import random_state, set_random_state
from lightning_3d.log import get_logger

_log = get_logger(__name__)

_CPU = torch.device("cpu")
# What such a loader tells Lightning, which asks whether it can be put back.
_MARK = "lightning_3d"
_LOADERS = "combined_loader"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A place in the data of a loader.

    Attributes:
        random: The random states with which its epoch began.
        order: Those with which its sampler began to draw; None for a loader without indices.
        generators: The states of the loader's own generators when the epoch began.
        rounds: Batches that every data rank has used.
        unit: What all data ranks read in a round: samples, or batches where a sampler of the user's makes them.
        ranks: Data ranks.
    """

    random: Mapping[str, Any]
    order: Mapping[str, Any] | None
    generators: Sequence[torch.Tensor]
    rounds: int
    unit: int
    ranks: int


class LoaderPlaces:
    """The places of the training loaders of a run.

    Args:
        ranks: Number of data ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._to_come: list[Place | None] = []
        self._resumes = False

    def now(self, trainer: Trainer) -> list[dict[str, Any] | None]:
        """Returns the places in plain containers; None for a loader that tells its own, and after an epoch."""
        loop = trainer.fit_loop
        if loop._combined_loader is None or loop.epoch_loop.batch_progress.is_last_batch:
            return []
        fetched = 0 if loop._data_fetcher is None else loop._data_fetcher.fetched
        used: Any = loop.epoch_loop.batch_progress.current
        ahead = max(fetched - used.processed, 0)
        found = [getattr(loader, "place_now", None) for loader in loop._combined_loader.flattened]
        places = [None if tell is None else tell(ahead) for tell in found]
        return [None if place is None else asdict(place) for place in places]

    def resume(self, trainer: Trainer, saved: Sequence[Mapping[str, Any] | None] | None) -> None:
        """Has the next training loaders go on where those of a checkpoint were."""
        self._resumes = trainer.state.fn == TrainerFn.FITTING
        self._to_come = [None if place is None else Place(**place) for place in saved or ()] if self._resumes else []

    def begin_training(self) -> None:
        """Forgets a checkpoint whose loaders are there."""
        self._to_come, self._resumes = [], False

    def follow(self, loader: Any, trainer: Trainer) -> Any:
        """Returns a training loader in whose place a run can go on later, or now; others as they are."""
        if not trainer.training:
            return loader
        if hasattr(loader, "state_dict"):
            self._to_come = self._to_come[1:]
            return loader
        place, self._to_come = (self._to_come[0], self._to_come[1:]) if self._to_come else (None, [])
        unit = (getattr(loader, "batch_size", None) or 1) * self._ranks
        if place is not None:
            place = self._moved(place, unit, trainer, by_index=_has_indices(loader))
        return PlacedLoader(loader, place, unit=unit, ranks=self._ranks, resumes=self._resumes)

    def _moved(self, place: Place, unit: int, trainer: Trainer, *, by_index: bool) -> Place | None:
        """The same place in rounds of another size; None if it cannot be found."""
        if place.ranks != self._ranks and not by_index:
            _log.warning(
                "A training loader without indices was read by %d data ranks and is read by %d now: its epoch begins "
                "anew.",
                *(place.ranks, self._ranks),
            )
            return None
        rounds, rest = divmod(place.rounds * place.unit, unit)
        if rest:
            _log.warning("%d of what was read in the epoch are read again: batches are %d now.", rest, unit)
        if rounds != place.rounds:
            progress = trainer.fit_loop.epoch_loop.batch_progress.current
            for name in ("ready", "started", "processed", "completed"):
                setattr(progress, name, max(getattr(progress, name) - place.rounds + rounds, 0))
        return replace(place, rounds=rounds, unit=unit, ranks=self._ranks)


class PlacedLoader(LoaderInPlace):
    """A loader that can say where it is, and begin at a place.

    Args:
        loader: An iterable of batches.
        place: Where its first iteration begins; None at the beginning.
        unit: See `Place`.
        ranks: Data ranks.
        resumes: Its first iteration begins with the first batch that is asked for, when generators are put back.
    """

    def __init__(self, loader: Any, place: Place | None, *, unit: int, ranks: int, resumes: bool) -> None:
        super().__init__(loader, _place=place, _now=None, _unit=unit, _ranks=ranks, _resumes=resumes)
        vars(self)["_read"] = _Read(loader) if _has_indices(loader) else None

    def place_now(self, ahead: int) -> Place | None:
        """Returns the place of the iteration that was begun last, of which so many batches are not used yet."""
        own = vars(self)
        now: Place | None = own["_now"]
        if now is None:
            return None
        order = None if own["_read"] is None else own["_read"].order
        return replace(now, rounds=now.rounds - ahead, order=order)

    def state_dict(self) -> dict[str, Any]:
        """Returns a mark: the place is kept beside Lightning's own."""
        return {_MARK: True}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to do; see `LoaderPlaces.resume`."""

    def __iter__(self) -> Iterator[Any]:
        own = vars(self)
        place, resumes = own["_place"], own["_resumes"]
        own["_place"], own["_resumes"] = None, False
        return self._later(place) if resumes else self._counted(self._begun(place))

    def _later(self, place: Place | None) -> Iterator[Any]:
        yield from self._counted(self._begun(place))

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        own = vars(self)
        for batch in batches:
            own["_now"] = replace(own["_now"], rounds=own["_now"].rounds + 1)
            yield batch

    def _begun(self, place: Place | None) -> Iterator[Any]:
        own, loader = vars(self), self._loader
        read: _Read | None = own["_read"]
        generators = _generators(loader)
        if place is None:
            states = tuple(each.get_state() for each in generators)
            unit, ranks = own["_unit"], own["_ranks"]
            own["_now"] = Place(
                random=random_state(_CPU), order=None, generators=states, rounds=0, unit=unit, ranks=ranks
            )
            return iter(loader) if read is None else read.begin()
        own["_now"] = place
        if len(place.generators) == len(generators):
            for generator, state in zip(generators, place.generators, strict=True):
                generator.set_state(state)
        with _drawing_as(place.random):
            return _after(loader, place.rounds) if read is None else read.begin(place.rounds, place.order)


class _Read:
    """A loader with indices, read from the beginning of an epoch or from later on.

    Attributes:
        order: The random states with which its sampler has drawn the order of the iteration that was begun last.

    Args:
        loader: The loader; it is not changed.
    """

    def __init__(self, loader: Any) -> None:
        self._twin = copy.copy(loader)
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._sampler = getattr(loader, name)
        vars(self._twin).update({name: self, "_iterator": None})
        self.order: Mapping[str, Any] | None = None
        self._left_out = 0
        self._given: Mapping[str, Any] | None = None

    def begin(self, left_out: int = 0, order: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """Returns the batches of an epoch.

        Args:
            left_out: How many are not read.
            order: The random states to draw the order with.
        """
        self.order, self._left_out, self._given = order, left_out, order
        return iter(self._twin)

    def __iter__(self) -> Iterator[Any]:
        """Stands in the place of the sampler."""
        if self._given is None:
            self.order = random_state(_CPU)
            items, first = self._drawn()
        else:
            with _drawing_as(self._given):
                items, first = self._drawn()
        yield from first
        yield from items

    def _drawn(self) -> tuple[Iterator[Any], list[Any]]:
        # Samplers draw their order with their first item.
        items = iter(self._sampler)
        return items, list(itertools.islice(items, self._left_out, self._left_out + 1))

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


def without_marks(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint that plain Lightning resumes too: without what placed loaders have told it."""
    loops = checkpoint.get("loops") or {}
    states = loops.get("fit_loop", {}).get("state_dict", {}).get(_LOADERS)
    if not states or not any(_is_mark(state) for state in states):
        return dict(checkpoint)
    fit = loops["fit_loop"]
    rest = {key: value for key, value in fit["state_dict"].items() if key != _LOADERS}
    if not all(_is_mark(state) for state in states):
        rest[_LOADERS] = [state for state in states if not _is_mark(state)]
    return {**checkpoint, "loops": {**loops, "fit_loop": {**fit, "state_dict": rest}}}


def with_marks(loops: Mapping[str, Any], places: Sequence[Any]) -> None:
    """Puts back what `without_marks` has taken out, where other loaders tell their own places."""
    state = loops.get("fit_loop", {}).get("state_dict", {})
    others = iter(state.get(_LOADERS) or ())
    if state.get(_LOADERS):
        state[_LOADERS] = [next(others, {}) if place is None else {_MARK: True} for place in places]


def _is_mark(state: Any) -> bool:
    return isinstance(state, Mapping) and _MARK in state


def _has_indices(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _after(loader: Any, rounds: int) -> Iterator[Any]:
    """Begins a loader without indices, and reads so many batches of it."""
    # What was begun when the run was planned had other random numbers.
    inner = vars(loader).get("_loader") if isinstance(loader, LoaderInPlace) else None
    batches = iter(inner if isinstance(inner, DataLoader) else loader)
    for _ in range(rounds):
        next(batches, None)
    return batches


@contextmanager
def _drawing_as(states: Mapping[str, Any]) -> Iterator[None]:
    """Context in which generators go on from given states; afterwards they are where they were."""
    with isolate_rng(include_cuda=False):
        set_random_state(dict(states), _CPU)
        yield


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators of a loader and of its samplers, each once."""
    batches = getattr(loader, "batch_sampler", None)
    owners = [loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
    owners += [getattr(owner, "inner", None) for owner in owners]
    found = [getattr(owner, "generator", None) for owner in owners]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
