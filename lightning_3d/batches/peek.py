"""The first batch of a loader, looked at before training begins and not consumed."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import DataLoader, IterableDataset, Sampler

from lightning_3d.batches.loaders import LoaderInPlace

_NO_BATCH = object()


def first_batch(loader: Any) -> tuple[Any, Any]:
    """Returns the batch that a loader would give first, and the loader to use from then on, which still gives it.

    A DataLoader over a dataset with indices stays as it is: the batch is fetched in this process, without its workers,
    and its samplers are put back. Of anything else an iterator is begun; the loader to use goes on with it. Random
    generators of torch, numpy and Python are left as they were.

    Args:
        loader: Any iterable of batches, or Lightning's CombinedLoader.

    Returns:
        The batch, None if there is none, and the loader to use. A CombinedLoader's batch is what it yields: the batch
        of its mode, the batch's index and the loader's.
    """
    with isolate_rng(include_cuda=False):
        if isinstance(loader, CombinedLoader):
            return _first_of_several(loader)
        if _is_fetchable(loader):
            try:
                return _fetched(loader), loader
            except Exception:
                # A dataset may be opened by `worker_init_fn`.
                if not loader.num_workers or loader.worker_init_fn is None:
                    raise
        begun = loader if isinstance(loader, BegunLoader) else BegunLoader(loader)
        batch = begun.peek()
    return (None, loader) if batch is _NO_BATCH else (batch, begun)


class BegunLoader(LoaderInPlace):
    """A loader whose first iteration goes on with an iterator of which one batch has been looked at.

    Later iterations are the loader's own. Every attribute is the loader's.

    Args:
        loader: An iterable of batches.
    """

    def __init__(self, loader: Any) -> None:
        super().__init__(loader, _begun=None)

    def peek(self) -> Any:
        """Returns the next batch of the iteration that is to come; begins it."""
        before = _states()
        batches: Iterator[Any] = iter(self)
        batch = next(batches, _NO_BATCH)
        if batch is not _NO_BATCH:
            vars(self)["_begun"] = _going_on(batch, batches, before, _states())
        return batch

    def load_state_dict(self, state: Any) -> None:
        """Moves the loader to another place, so that what was begun is void."""
        vars(self)["_begun"] = None
        self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:
        begun: Iterator[Any] | None = vars(self)["_begun"]
        vars(self)["_begun"] = None
        return iter(self._loader) if begun is None else begun


def _going_on(batch: Any, batches: Iterator[Any], before: list[Any], after: list[Any]) -> Iterator[Any]:
    """Gives a batch that was fetched before, and then the others.

    A generator that nobody has used since goes on from where the batch had left it, so that the next batch draws other
    numbers than this one did.
    """
    for kind, (then, left, now) in enumerate(zip(before, after, _states(), strict=True)):
        if _same(then, now) and not _same(then, left):
            _SETTERS[kind](left)
    yield batch
    yield from batches


def _states() -> list[Any]:
    """The states of Python's, numpy's and torch's generators."""
    return [random.getstate(), np.random.get_state(), torch.get_rng_state()]


_SETTERS: tuple[Callable[[Any], object], ...] = (random.setstate, np.random.set_state, torch.set_rng_state)


def _same(one: Any, other: Any) -> bool:
    """Whether two states are equal."""
    if isinstance(one, tuple):
        return all(map(_same, one, other))
    return np.array_equal(one, other)


# ---- several loaders ----


class _Stand:
    """Stands for one loader while a CombinedLoader takes its first batch; looks only if it is asked."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        batch, self.loader = first_batch(self.loader)
        if batch is not None:
            yield batch


def _first_of_several(combined: CombinedLoader) -> tuple[Any, CombinedLoader]:
    stands = [_Stand(loader) for loader in combined.flattened]
    batch = next(iter(_with_loaders(combined, stands)), None)
    return batch, _with_loaders(combined, [stand.loader for stand in stands])


def _with_loaders(combined: CombinedLoader, loaders: list[Any]) -> CombinedLoader:
    """The same combination of other loaders; the user's own is left alone."""
    twin = copy.copy(combined)
    twin.flattened = loaders
    return twin


# ---- datasets with indices ----


def _is_fetchable(loader: Any) -> bool:
    """Whether a batch can be fetched and the loader be as before."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return False
    return not isinstance(loader.dataset, IterableDataset) and not isinstance(loader._index_sampler, Iterator)


def _fetched(loader: DataLoader[Any]) -> Any:
    alone = copy.copy(loader)
    # Workers, their time-out and pinned memory change nothing in a batch.
    vars(alone).update(num_workers=0, timeout=0, pin_memory=False, persistent_workers=False, _iterator=None)
    with _samplers_put_back(loader):
        return next(iter(alone), None)


@contextmanager
def _samplers_put_back(loader: DataLoader[Any]) -> Iterator[None]:
    """Context after which the samplers and generators of a loader are what they were."""
    put_back: dict[int, Callable[[], None]] = {}
    for value in (loader.generator, loader.sampler, loader.batch_sampler):
        _remember(value, put_back)
    try:
        yield
    finally:
        for each in put_back.values():
            each()


def _remember(value: Any, put_back: dict[int, Callable[[], None]]) -> None:
    """Notes how to put back a generator, or a sampler and what it holds."""
    if id(value) in put_back:
        return
    if isinstance(value, torch.Generator):
        put_back[id(value)] = _setting(value.set_state, value.get_state())
    elif isinstance(value, random.Random):
        put_back[id(value)] = _setting(value.setstate, value.getstate())
    elif isinstance(value, np.random.RandomState):
        put_back[id(value)] = _setting(value.set_state, value.get_state())
    elif isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        put_back[id(value)] = _setting(lambda state: setattr(bits, "state", state), bits.state)
    elif isinstance(value, Sampler):
        attributes = {key: _copied(item) for key, item in vars(value).items()}
        put_back[id(value)] = _setting(vars(value).update, attributes)
        for item in vars(value).values():
            _remember(item, put_back)
    elif isinstance(getattr(value, "_sampler", None), Sampler):
        # Lightning's dataset of another sampler's indices.
        _remember(value._sampler, put_back)


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


def _setting(setter: Callable[[Any], Any], state: Any) -> Callable[[], None]:
    return lambda: setter(state)
