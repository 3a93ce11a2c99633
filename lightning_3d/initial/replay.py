"""Replaying recorded initialisation: one tensor at a time, with random numbers that depend on its name only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d.initial.log import Constant, Operation, OperationLog, Window
from lightning_3d.random.seeds import derive_seed
from lightning_3d.random.streams import default_generators, seeded

CPU = torch.device("cpu")


class InitTape:
    """The recorded initial values of one module's parameters, buffers and other tensors.

    A value depends on the seed, its name and the operations that made it, and on nothing else: not on other modules,
    their order, the mesh or the global generators. Where several tensors come from one draw (ties, deep copies,
    clones), the first name decides and all of them see the same numbers, as in an eager run.

    Args:
        log: The recording.
        windows: Every name that has a value, in the order in which names win, with its place in the recording.
        seed: The run's seed, equal on all ranks.
        early: Seeds of the random operations whose result was needed while recording.
    """

    def __init__(
        self, log: OperationLog, windows: Mapping[str, Window], *, seed: int, early: Mapping[int, int]
    ) -> None:
        self._log = log
        self._windows = dict(windows)
        self._seeds = dict(early)
        for name, window in self._windows.items():
            fresh = [index for index in log.slice(window.storage) if self._draws(index)]
            self._seeds |= {index: derive_seed(seed, "initial", name, call) for call, index in enumerate(fresh)}

    def __contains__(self, name: object) -> bool:
        return name in self._windows

    def value(self, name: str) -> Tensor:
        """Replays one tensor's initialisation on the CPU, which gives the same numbers on every machine.

        Args:
            name: A parameter's or buffer's name, any of them if it has several.

        Returns:
            The whole tensor, in its recorded shape, strides and dtype, not shared with any other.
        """
        return replay(self._log, self._windows[name], self._seeds.__getitem__)

    def _draws(self, index: int) -> bool:
        return index not in self._seeds and self._log.operations[index].random


def replay(log: OperationLog, window: Window, seed_of: Callable[[int], int]) -> Tensor:
    """Computes on the CPU what a window holds at the end of a log, running only the operations that matter.

    Args:
        log: The recording.
        window: What to compute.
        seed_of: The seed of a random operation, by its index.

    Returns:
        The tensor; storages of intermediate results are freed as soon as nothing reads them.
    """
    indices = log.slice(window.storage)
    last_use = {storage: index for index in indices for storage in _touched(log.operations[index])}
    last_use.pop(window.storage, None)
    memory = _Memory(log)
    generators = default_generators([CPU])
    with torch.no_grad(), _default_dtype_restored():
        for index in indices:
            operation = log.operations[index]
            with seeded(generators, seed_of(index)) if operation.random else nullcontext():
                memory.run(operation)
            memory.drop(storage for storage in _touched(operation) if last_use.get(storage) == index)
        value = window.on(memory.storage(window.storage))
        return value if window.covers(value.untyped_storage().nbytes()) else value.clone()


class _Memory:
    """Real storages in the place of the recorded ones."""

    def __init__(self, log: OperationLog) -> None:
        self._log = log
        self._storages: dict[int, torch.UntypedStorage] = {}

    def storage(self, key: int) -> torch.UntypedStorage:
        # Zeros, so that elements which nothing ever wrote are equal on all ranks.
        if key not in self._storages:
            nbytes = self._log.storages[key].nbytes()
            self._storages[key] = torch.zeros(nbytes, dtype=torch.uint8, device=CPU).untyped_storage()
        return self._storages[key]

    def run(self, operation: Operation) -> None:
        torch.set_default_dtype(operation.default_dtype)
        args, kwargs = tree_map(self._real, (operation.args, operation.kwargs))
        outputs = [leaf for leaf in tree_leaves(operation.function(*args, **kwargs)) if isinstance(leaf, Tensor)]
        for output, window in zip(outputs, operation.results, strict=True):
            if window is not None:
                self._keep(output, window)

    def drop(self, keys: Iterator[int]) -> None:
        for key in keys:
            self._storages.pop(key, None)

    def _keep(self, output: Tensor, window: Window) -> None:
        storage = output.untyped_storage()
        laid_out = tuple(output.stride()) == window.stride and output.storage_offset() == window.offset
        if laid_out and storage.nbytes() == self._log.storages[window.storage].nbytes():
            self._storages[window.storage] = storage
        else:
            window.on(self.storage(window.storage)).copy_(output)

    def _real(self, value: Any) -> Any:
        if isinstance(value, Window):
            return value.on(self.storage(value.storage))
        if isinstance(value, Constant):
            return value.tensor.to(CPU)
        if isinstance(value, torch.device) and value.type == "meta":
            return CPU
        return value


def _touched(operation: Operation) -> Sequence[int]:
    return tuple(operation.reads | operation.writes)


@contextmanager
def _default_dtype_restored() -> Iterator[None]:
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)
