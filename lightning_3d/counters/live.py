"""Live bytes: the exact size of all storages alive, their peak, and what the peak is made of."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.counters.categories import Category
from lightning_3d.counters.tensors import plain_tensors
from lightning_3d.units import format_bytes

_COMMUNICATION_NAMESPACES = ("c10d", "fsdp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The highest sum of live bytes.

    Args:
        size: Bytes.
        phase: Phase in which it was reached.
    """

    size: int
    phase: str

    def __str__(self) -> str:
        return f"{format_bytes(self.size)} in {self.phase}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakReport:
    """A peak and what it is made of.

    Args:
        peak: The peak.
        categories: Bytes by category at that moment.
    """

    peak: Peak
    categories: Mapping[Category, int]

    @property
    def exact(self) -> bool:
        """Whether the categories add up to the peak."""
        return sum(self.categories.values()) == self.peak.size

    def __str__(self) -> str:
        rows = [f"  {category.value:<20} {format_bytes(size):>12}" for category, size in self.categories.items()]
        return "\n".join([f"peak {self.peak}", *rows])


@dataclass(slots=True)
class _Storage:
    size: int
    communication: bool
    reference: weakref.ref[torch.UntypedStorage]


class LiveBytes(TorchDispatchMode):
    """Follows every storage made inside ``with``, real or fake, until it is freed.

    What exists before is told by `track`. Bytes are those of tensors, not of an allocator or a backend.
    While it is entered, `UntypedStorage.resize_` (FSDP2 frees by it) and DTensor's shape propagation (which makes
    global-shape tensors that hold no memory) are watched by scoped patches: for measured steps, not for training.

    A backend's thread may hold the tensors of a collective a moment longer than the code that asked for it, so on real
    processes the peak may differ a little between runs.

    Attributes:
        peak: The highest since the start or the last `rewind`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = Peak(size=0, phase="start")
        self._phase = "start"
        self._muted = 0
        self._bytes = 0
        self._storages: dict[int, _Storage] = {}
        # Storages die on any thread and at any moment; their keys wait here for this one.
        self._dead: collections.deque[int] = collections.deque()
        self._watch: Callable[[], None] | None = None
        self._follow: Callable[[], None] | None = None
        self._patches = contextlib.ExitStack()

    @property
    def current(self) -> int:
        """Live bytes now."""
        self._bury()
        return self._bytes

    def track(self, *values: object) -> None:
        """Adds the storages of modules (with gradients), optimizers, tensors and containers of tensors."""
        for value in values:
            for tensor in _tensors_of(value):
                self._see(tensor, communication=False)
        self._step()

    def rewind(self) -> None:
        """Starts a new peak from what is alive now."""
        self._watch = None
        self.peak = Peak(size=self.current, phase=self._phase)

    def watch(self, action: Callable[[], None]) -> None:
        """Calls ``action`` now and at every new peak, until the next `rewind`."""
        self._watch = action
        action()

    def follow(self, action: Callable[[], None] | None) -> None:
        """Calls ``action`` after every operation, from now on; None for nothing."""
        self._follow = action

    @property
    def running(self) -> str:
        """Name of the present part of the step."""
        return self._phase

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names a part of the step."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def by_category(self, owners: Mapping[int, Category]) -> dict[Category, int]:
        """Returns the live bytes of each category that has any, as of the last operation or look at `current`.

        Args:
            owners: Category by storage, from `Owners`; storages it does not name count as communication if a
                collective has touched them, else as activations and other temporaries.
        """
        sums = dict.fromkeys(Category, 0)
        for key, storage in self._storages.items():
            unowned = Category.COMMUNICATION if storage.communication else Category.OTHER
            sums[owners.get(key, unowned)] += storage.size
        return {category: size for category, size in sums.items() if size}

    def __enter__(self) -> LiveBytes:
        self._patches.enter_context(_patched(torch.UntypedStorage, "resize_", self._followed_resize))
        for name in vars(ShardingPropagator):
            if "propagate_tensor_meta" in name:
                self._patches.enter_context(_patched(ShardingPropagator, name, self._muted_call))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._patches.close()

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the operation and follows the storages of its results."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if self._muted:
            return result
        communication = func.namespace in _COMMUNICATION_NAMESPACES
        for tensor in plain_tensors((args, result) if communication else result):
            self._see(tensor, communication=communication)
        for tensor in plain_tensors(result) if func.namespace == "_c10d_functional" else ():
            self._see(tensor, communication=True)
        self._step()
        return result

    def _see(self, tensor: torch.Tensor, *, communication: bool) -> None:
        if tensor.layout != torch.strided or tensor.is_meta:
            return
        storage = tensor.untyped_storage()
        known = self._known(storage)
        if known is None:
            self._add(storage, communication)
        else:
            known.communication |= communication
            self._resize(storage, known)

    def _bury(self) -> None:
        while self._dead:
            self._bytes -= self._storages.pop(self._dead.popleft()).size

    def _known(self, storage: torch.UntypedStorage) -> _Storage | None:
        self._bury()  # a dead storage's key may have been given to this one
        return self._storages.get(storage._cdata)

    def _add(self, storage: torch.UntypedStorage, communication: bool) -> None:
        key, size, dead = storage._cdata, storage.nbytes(), self._dead
        reference = weakref.ref(storage, lambda _: dead.append(key))
        self._storages[key] = _Storage(size=size, communication=communication, reference=reference)
        self._bytes += size

    def _resize(self, storage: torch.UntypedStorage, known: _Storage) -> None:
        size = storage.nbytes()
        self._bytes += size - known.size
        known.size = size

    def _step(self) -> None:
        size = self.current
        if size > self.peak.size:
            self.peak = Peak(size=size, phase=self._phase)
            if self._watch is not None:
                self._watch()
        if self._follow is not None:
            self._follow()

    def _followed_resize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            known = self._known(storage)
            if known is not None:
                self._resize(storage, known)
                self._step()
            return result

        return resize_

    def _muted_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def propagate(*args: Any, **kwargs: Any) -> Any:
            self._muted += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._muted -= 1

        return propagate


def measure_peak(
    live: LiveBytes, step: Callable[[], object], owners: Callable[[], Mapping[int, Category]]
) -> PeakReport:
    """Runs a step and returns its peak, and what is alive there.

    Args:
        live: Entered, tracking what exists.
        step: Warmed up, so that gradients and optimizer states exist or not as in later ones.
        owners: Called at every new peak, e.g. ``Owners([model], [optimizer])``.
    """
    categories: dict[Category, int] = {}

    def look() -> None:
        categories.clear()
        categories.update(live.by_category(owners()))

    live.rewind()
    live.watch(look)
    step()
    report = PeakReport(peak=live.peak, categories=categories)
    live.rewind()
    return report


def _tensors_of(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, nn.Module):
        parameters = list(value.parameters())
        yield from plain_tensors([*parameters, *(p.grad for p in parameters), *value.buffers()])
    elif isinstance(value, torch.optim.Optimizer):
        yield from plain_tensors([dict(state) for state in value.state.values()])
    else:
        yield from plain_tensors(value)


@contextlib.contextmanager
def _patched(owner: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    original = getattr(owner, name)
    inherited = name not in vars(owner)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)
