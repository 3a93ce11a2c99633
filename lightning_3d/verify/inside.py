"""What goes on inside a module's first batch: random draws, narrow numbers, values and attributes, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from lightning_3d.batches.weights import loss_of
from lightning_3d.graph.parameters import class_name
from lightning_3d.parallel.tensor.doors import whole

OF_THE_STEP = "the step itself"
# Of larger tensors every n-th element is looked at.
_MOST_ELEMENTS = 2**18
_RATES = ("p", "dropout_p")
_PLAIN = (bool, int, float, str)


class Watch(Callback):
    """Sees which modules draw random numbers, and which compute in less than fp64, in the first batch on one device.

    Attributes:
        draws: How often each module drew.
        narrow: The floating dtypes below fp64 that were computed with, and the first module that did.
    """

    def __init__(self) -> None:
        self.draws: Counter[str] = Counter()
        self.narrow: dict[str, str] = {}
        self._open: list[str] = []
        self._close: list[Callable[[], Any]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins to watch."""
        if batch_idx:
            return
        for name, module in pl_module.named_modules():
            if name:
                enter = module.register_forward_pre_hook(lambda *_, name=name: self._open.append(name))
                leave = module.register_forward_hook(lambda *_: self._leave(), always_call=True)
                self._close += [enter.remove, leave.remove]
        stack = ExitStack()
        stack.enter_context(_Operations(self._saw))
        self._close.append(stack.close)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends it."""
        while self._close:
            self._close.pop()()
        loss = loss_of(outputs)
        if loss is not None and _is_narrow(loss):
            self._note(loss, OF_THE_STEP)

    def _leave(self) -> None:
        if self._open:
            self._open.pop()

    def _saw(self, function: Any, given: Mapping[str, Any], result: Any) -> None:
        place = self._open[-1] if self._open else OF_THE_STEP
        # Attention has the tag of an operation that draws, whether its dropout is on or not.
        off = any(given.get(rate) == 0.0 for rate in _RATES)
        if torch.Tag.nondeterministic_seeded in function.tags and not off:
            self.draws[place] += 1
        for leaf in pytree.tree_leaves(result):
            # Outside of modules single numbers are Lightning's or the optimizer's own, such as counts of steps.
            if _is_narrow(leaf) and (self._open or leaf.numel() > 1):
                self._note(leaf, place)

    def _note(self, leaf: Tensor, place: str) -> None:
        self.narrow.setdefault(str(leaf.dtype).removeprefix("torch."), place)


class _Operations(TorchDispatchMode):
    """Tells of every operation."""

    def __init__(self, saw: Callable[[Any, Mapping[str, Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tell = saw

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        names = (argument.name for argument in func._schema.arguments)
        self._tell(func, {**dict(zip(names, args, strict=False)), **(kwargs or {})}, result)
        return result


class Trace(Callback):
    """Keeps what modules return in the first batch, and which attributes a batch changes.

    Args:
        inner: Look at what is inside of blocks as well; on a tensor axis that would keep blocks from being replayed.

    Attributes:
        calls: Name of the module and the number of its call, as calls ended.
        values: What each of them returned, flat.
        changed: Names of attributes that hold something else after the batch, by module.
        kinds: Classes of the modules.
    """

    def __init__(self, *, inner: bool) -> None:
        self.calls: list[tuple[str, int]] = []
        self.values: list[Tensor] = []
        self.changed: dict[str, list[str]] = {}
        self.kinds: dict[str, str] = {}
        self._inner = inner
        self._counts: Counter[str] = Counter()
        self._before: dict[str, dict[str, Any]] = {}
        self._hooks: list[Any] = []

    def state(self) -> dict[str, Any]:
        """Returns everything as plain values."""
        return {"calls": self.calls, "values": self.values, "changed": self.changed, "kinds": self.kinds}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins to look."""
        if batch_idx:
            return
        self._before = {name: _attributes(module) for name, module in pl_module.named_modules() if name}
        for name, module in self._modules(pl_module):
            self.kinds[name] = class_name(module)
            self._hooks.append(module.register_forward_hook(lambda _, __, result, name=name: self._keep(name, result)))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if batch_idx:
            return
        for name, module in pl_module.named_modules():
            before, after = self._before.get(name, {}), _attributes(module)
            changed = [key for key in before if key in after and before[key] != after[key]]
            if changed:
                self.changed[name] = changed

    def _modules(self, module: LightningModule) -> Iterator[tuple[str, nn.Module]]:
        if self._inner:
            yield from ((name, child) for name, child in module.named_modules() if name)
            return
        names = {name: child for name, child in module.named_modules() if name}
        blocks = [f"{name}.{key}" for name, child in names.items() for key in _numbered(child)]
        beside = [name for name, child in module.named_children() if next(child.children(), None) is None]
        yield from ((name, names[name]) for name in dict.fromkeys((*blocks, *beside)))

    def _keep(self, name: str, result: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            # A recomputation in backward.
            return
        with torch.no_grad():
            # Of a tensor that is cut here the whole; every rank of it is here.
            leaves = [leaf for leaf in pytree.tree_leaves(whole(result)) if _is_plain(leaf)]
        number = self._counts[name]
        self._counts[name] += 1
        if leaves:
            self.calls.append((name, number))
            self.values.append(torch.cat([_few(leaf) for leaf in leaves]))


def _numbered(container: nn.Module) -> list[str]:
    """Names of the blocks in a list of modules; their classes are not one any more when they are on a mesh."""
    children = dict(container.named_children())
    same = len({class_name(child) for child in children.values()}) == 1
    return list(children) if isinstance(container, (nn.ModuleList, nn.Sequential)) and same else []


def _is_narrow(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64


def _is_plain(leaf: object) -> bool:
    """Whether it is a tensor that holds its values itself."""
    return type(leaf) in (Tensor, nn.Parameter) and leaf.is_floating_point() and not leaf.is_meta  # type: ignore[attr-defined]


def _few(leaf: Tensor) -> Tensor:
    flat = leaf.detach().flatten()
    return flat[:: 1 + flat.numel() // _MOST_ELEMENTS].double().cpu().clone()


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Plain values among a module's own attributes, and its buffers and other tensors as text."""
    found: dict[str, Any] = {}
    for key, value in (*vars(module).items(), *module._buffers.items()):
        if key in ("training", "_is_hf_initialized"):
            continue
        if isinstance(value, _PLAIN):
            found[key] = value
        elif type(value) is Tensor and not value.is_meta and value.numel():
            found[key] = (float(value.double().sum()), value.numel()) if not value.is_complex() else value.numel()
    return found
