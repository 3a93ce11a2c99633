"""Random streams: what a module draws depends on the step, the micro-batch and the module, not on the layout."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from lightning_3d.errors import ModuleError
from lightning_3d.random.seeds import derive_seed

_NUMPY_SEEDS = 2**32 - 1


def default_generators(devices: Iterable[torch.device] = ()) -> tuple[torch.Generator, ...]:
    """Finds the generators that torch draws from when it is given none.

    Args:
        devices: Accelerator devices; ``cpu`` and ``meta`` are accepted and add nothing.

    Returns:
        The CPU's default generator, then one per accelerator device.
    """
    found = [torch.default_generator]
    for device in devices:
        if device.type in ("cpu", "meta"):
            continue
        backend = torch.get_device_module(device)
        backend.init()
        ordinal: int | None = device.index
        index = backend.current_device() if ordinal is None else ordinal
        found.append(backend.default_generators[index])
    return tuple(found)


@contextmanager
def seeded(generators: Iterable[torch.Generator], seed: int) -> Iterator[None]:
    """Seeds generators for the length of a block and puts them back as they were, also after an exception.

    Args:
        generators: The generators to borrow, usually from :func:`default_generators`.
        seed: The seed that all of them get.
    """
    states = [(generator, generator.get_state()) for generator in generators]
    try:
        for generator, _ in states:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


class HostGenerators:
    """Python's and NumPy's own generators, the ones that are used by those who make none."""

    def __init__(self) -> None:
        # Put in the place of NumPy's, which is faster than to save and restore that one's state.
        self._spare = np.random.MT19937()

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seeds both for the length of a block and puts them back as they were, also after an exception.

        Args:
            seed: The seed that both get, NumPy its lowest 32 bits.
        """
        python, numpy = random.getstate(), get_bit_generator()
        set_bit_generator(self._spare)
        try:
            random.seed(seed)
            np.random.seed(seed & _NUMPY_SEEDS)
            yield
        finally:
            random.setstate(python)
            set_bit_generator(numpy)


class _Frame:
    """One open stream: its seed and how often each name was entered directly under it."""

    __slots__ = ("calls", "recomputed", "seed")

    def __init__(self, seed: int, *, recomputed: bool = False) -> None:
        self.seed = seed
        self.recomputed = recomputed
        self.calls: dict[str, int] = {}


class RandomStreams:
    """Streams for the modules that draw random numbers.

    The strategy says where the run is (:meth:`at`); each drawing module runs inside :meth:`stream`. The stream's seed
    is derived from the base seed, the step, the global micro-batch, the path of enclosing streams, the name, and the
    number of earlier entries of that name under the same enclosing stream. So a module called twice draws different
    numbers each time, and a block on its own pipeline stage draws what it draws in the whole model.

    Only torch's default generators are seeded, and only inside; Python's and NumPy's where a stream is asked to.

    With ``torch.utils.checkpoint`` (``preserve_rng_state=True``, its default) the right order is stream outside,
    checkpoint inside: torch itself then restores the stream's state for the recomputation. A stream inside a
    checkpointed function is exact too: its recomputation finds the enclosing stream in the restored generator state
    and enters the name as call 0, so counts do not advance in backward. Only a name entered more than once under
    one enclosing stream cannot be told apart there, and raises. A stream inside a checkpoint with no stream around
    both uses the current position, so the position must then be the forward's during backward too.

    Args:
        seed: The run's seed, equal on all ranks.
        devices: Accelerator devices whose generators are seeded beside the CPU's.
    """

    def __init__(self, seed: int, devices: Iterable[torch.device] = ()) -> None:
        self._seed = seed
        self._generators = default_generators(devices)
        self._host = HostGenerators()
        self._step = 0
        self._root = _Frame(derive_seed(seed, 0, 0))
        self._open = self._root
        # Kept until the next step, because backward may recompute any micro-batch of this one.
        self._parents: set[int] = set()
        self._repeated: set[tuple[int, str]] = set()

    def at(self, *, step: int, microbatch: int) -> None:
        """Moves to the beginning of a micro-batch; coming back to one gives the same streams again.

        Args:
            step: A number that grows with every batch, also within an accumulation window: two batches at the same
                step and micro-batch would draw the same numbers.
            microbatch: Global number of the micro-batch: data rank x micro-batches + index.
        """
        assert self._open is self._root, "the position moves only outside streams"
        if step != self._step:
            self._parents.clear()
            self._repeated.clear()
            self._step = step
        self._root = self._open = _Frame(derive_seed(self._seed, step, microbatch))

    @contextmanager
    def stream(self, name: str, *, host: bool = False) -> Iterator[None]:
        """Runs a block with the generators seeded for this call of ``name``.

        Args:
            name: The module's name in the model.
            host: Python's and NumPy's own generators are seeded too.

        Raises:
            ModuleError: In a backward recomputation that cannot tell which of several calls it repeats.
        """
        outer = self._open
        self._open = self._recomputed(name) if self._in_recomputation() else self._entered(name)
        try:
            with (
                seeded(self._generators, self._open.seed),
                self._host.seeded(self._open.seed) if host else nullcontext(),
            ):
                yield
        finally:
            self._open = outer

    def skip(self, name: str) -> None:
        """Counts a call of ``name`` that another rank makes, so that later ones draw what they draw in one process.

        Args:
            name: The module's name in the model.
        """
        self._entered(name)

    def _in_recomputation(self) -> bool:
        # Inside a stream that was itself entered again in backward, calls are counted from its beginning as usual.
        return torch._C._current_graph_task_id() != -1 and not self._open.recomputed

    def _entered(self, name: str) -> _Frame:
        parent = self._open
        count = parent.calls.get(name, 0)
        parent.calls[name] = count + 1
        self._parents.add(parent.seed)
        if count:
            self._repeated.add((parent.seed, name))
        return _Frame(derive_seed(parent.seed, name, count), recomputed=parent.recomputed)

    def _recomputed(self, name: str) -> _Frame:
        # The checkpoint has restored the generator, whose initial seed is that of the stream around the forward call.
        around = torch.default_generator.initial_seed()
        parent = around if around in self._parents else self._root.seed
        if (parent, name) in self._repeated:
            raise ModuleError(
                f"'{name}' draws random numbers, was called more than once by the same module, and runs inside "
                "torch.utils.checkpoint: its recomputation cannot tell which call it repeats.",
                fix="checkpoint inside that module's forward, or use activation_checkpointing='full' of the strategy "
                "instead, or layout_free_random=False",
            )
        return _Frame(derive_seed(parent, name, 0), recomputed=True)
