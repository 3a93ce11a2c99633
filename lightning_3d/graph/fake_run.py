"""One run of the user's step in which parameters have no values: what every plan is made from.

The batch is real, so masks, positions and labels keep their values. Blocks that repeat another are not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchmetrics import Metric

from lightning_3d.errors import ModuleError, user_line
from lightning_3d.graph.blocks import Stack, containers, outer_modules
from lightning_3d.graph.calls import Call, Handler, around_calls
from lightning_3d.graph.fake_parameters import fake_parameters
from lightning_3d.graph.grouped import in_a_known_precision
from lightning_3d.graph.observer import EndPass, Function, Observer, Proceed, ProceedModule, Scene, ValueRead
from lightning_3d.graph.places import innermost_call
from lightning_3d.graph.quiet import quiet
from lightning_3d.graph.repeats import Attributes, Repeat, block_kinds, signature
from lightning_3d.graph.stand_ins import without_metrics, without_optimizers
from lightning_3d.graph.values import all_finite, is_hidden, is_unforetellable, made_up, reads_values, with_positions

# Every pass teaches an observer something new; one that never learns enough is our mistake.
_MOST_PASSES = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeRun:
    """What a run took.

    Attributes:
        passes: How often the step was called.
        blocks_run: Calls of blocks that were computed, in all passes.
        blocks_repeated: Calls of blocks that looked like one before.
    """

    passes: int
    blocks_run: int
    blocks_repeated: int


def fake_run(
    module: LightningModule, step: Callable[[], Any], *, stacks: Sequence[Stack], observers: Sequence[Observer]
) -> FakeRun:
    """Runs a step until every observer has seen enough; no trace is left in the module.

    Args:
        module: The whole module as its author wrote it, real or on the meta device.
        step: Calls the user's step with a real batch, in the autograd and autocast modes that it will have.
        stacks: The module's stacks of blocks.
        observers: Who watches; the first stands outermost.

    Raises:
        ModuleError: The step reads values of a hidden state and no observer lets it, or it calls an operator whose
            results torch cannot foretell.
    """
    with fake_parameters(module) as parameters, torch.compiler.set_stance("force_eager"):
        kinds = {
            name: (kind, *(observer.tells_apart(name) for observer in observers))
            for name, kind in block_kinds(module, stacks).items()
        }
        modules = {child: name for name, child in module.named_modules()}
        scene = Scene(parameters=parameters, modules=modules, blocks=frozenset(kinds))
        calls = _Calls(kinds, scene, observers)
        watched = _watched(module, stacks, observers)
        for passes in range(1, _MOST_PASSES + 1):
            if not _one_pass(module, step, calls, watched):
                return FakeRun(passes=passes, blocks_run=calls.blocks_run, blocks_repeated=calls.blocks_repeated)
    raise AssertionError(f"no plan after {_MOST_PASSES} passes")


def _one_pass(module: LightningModule, step: Callable[[], Any], calls: _Calls, watched: list[str]) -> bool:
    """Returns whether another one is needed."""
    calls.begin()
    output = None
    with ExitStack() as context:
        for start in (quiet, without_metrics, without_optimizers):
            context.enter_context(start(module))
        for name in watched:
            context.enter_context(_handled(module.get_submodule(name), partial(calls.around_module, name)))
        context.enter_context(_Functions(calls))
        try:
            output = step()
        except EndPass:
            pass
        except RuntimeError as failure:
            if not is_unforetellable(failure):
                raise
            raise ModuleError(
                f"the step calls an operator of which torch does not know what it returns: {failure}",
                fix="torch.library.register_fake for the operator",
            ) from failure
    wishes = [observer.end(output) for observer in calls.observers]
    return any(wishes)


def _watched(module: nn.Module, stacks: Sequence[Stack], observers: Sequence[Observer]) -> list[str]:
    names = {block for stack in stacks for block in stack.blocks}
    names.update(containers(module, tuple(stacks)), outer_modules(module, tuple(stacks)))
    names.update(*(observer.watched() for observer in observers))
    return [name for name, child in module.named_modules() if name in names and not isinstance(child, Metric)]


@contextmanager
def _handled(module: nn.Module, handler: Handler) -> Iterator[None]:
    """Context in which a module's calls go through the handler; `quiet` around it puts its attributes back."""
    kind = type(module)
    around_calls(module, handler)
    try:
        yield
    finally:
        module.__class__ = kind


class _Functions(TorchFunctionMode):
    """Hands every function of torch to the observers."""

    def __init__(self, calls: _Calls) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _ACCESSES and func.__self__.__name__ not in _OPERATIONS:  # type: ignore[attr-defined]
            return func(*args, **(kwargs or {}))
        return self._calls.around_function(func, args, kwargs or {})


_ACCESSES = ("__get__", "__set__", "__delete__")
# Properties of a tensor that compute another one.
_OPERATIONS = ("T", "mT", "H", "mH", "real", "imag", "data")


class _Calls:
    """The calls of a run, on their way through the observers."""

    def __init__(self, kinds: Mapping[str, object], scene: Scene, observers: Sequence[Observer]) -> None:
        self.observers = observers
        self.blocks_run = self.blocks_repeated = 0
        self._kinds = kinds
        self._scene = scene
        self._blocks = {name: block for block, name in scene.modules.items() if name in kinds}
        self._repeats: dict[object, Repeat] = {}
        self.around_function: Proceed = self._function
        for observer in reversed(observers):
            self.around_function = partial(_proceed, observer, self.around_function)

    def begin(self) -> None:
        """Begins a pass."""
        self._repeats.clear()
        self._scene.block = None
        for observer in self.observers:
            observer.begin(self._scene)

    # ---- functions ----

    def _function(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = all_finite(function, args)
        if known is not None:
            return known
        if function == Tensor.data.__set__ and self._scene.name_of(args[0]) is not None:  # type: ignore[attr-defined]
            raise ModuleError(
                f"the step sets the data of {self._scene.name_of(args[0])} at {user_line()}, which changes nothing in "
                "a parameter that is divided among ranks.",
                fix="parameter.copy_(...) under torch.no_grad()",
            )
        if function is Tensor.data_ptr and is_hidden(args[0]):
            raise ModuleError(
                f"data_ptr at {user_line()} takes the memory of a hidden state, and a plan is made without values.",
                fix="torch.library.custom_op around the kernel, with register_fake",
            )
        try:
            return in_a_known_precision(function, args, kwargs)
        except Exception as failure:
            if not reads_values(function, failure):
                raise
            return self._without_values(function, args, kwargs, failure)

    def _without_values(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], failure: Exception
    ) -> Any:
        masked = with_positions(function, args, kwargs)
        if masked is not None:
            return masked[0](*masked[1])
        call = innermost_call()
        read = ValueRead(
            function=getattr(function, "__name__", str(function)),
            module="" if call is None else self._scene.modules.get(cast("nn.Module", call.function), ""),
            call=call,
            line=user_line(),
        )
        answers = [observer.value_read(read) for observer in self.observers]
        if not any(answers):
            raise ModuleError(
                f"{read.function} in {read.module or 'the step'} ({read.line}) reads values of a hidden state, which a "
                "plan is made without.",
                fix="compute it with tensors (torch.where instead of if), or in a hook after the step",
            ) from failure
        return made_up(function, args, kwargs)

    # ---- modules ----

    def around_module(self, name: str, call: Call) -> Any:
        """Returns what a call of a watched module returns, or one that it repeats."""
        proceed: ProceedModule = partial(self._block if name in self._kinds else _computed, name, call)
        for observer in reversed(self.observers):
            proceed = partial(observer.around_module, name, proceed=proceed)
        return proceed(call.args, call.kwargs)

    def _block(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        must_run = any(observer.must_run(name) for observer in self.observers)
        looks = None if must_run else signature(args, kwargs)
        key = None if looks is None else (self._kinds[name], looks)
        first = self._repeats.get(key)
        if first is not None:
            self.blocks_repeated += 1
            for observer in self.observers:
                observer.repeated(name, first.block)
            with torch._C.DisableTorchFunction():
                return first.again(self._blocks[name], (args, kwargs))
        attributes = Attributes(self._blocks[name])
        outer, self._scene.block = self._scene.block, name
        output = call.function(*args, **kwargs)
        self._scene.block = outer
        self.blocks_run += 1
        left = attributes.left()
        if key is not None and left is not None:
            shown = Repeat(name, (args, kwargs), output, left)
            if shown.usable:
                self._repeats[key] = shown
        return output


def _computed(name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return call.function(*args, **kwargs)


def _proceed(
    observer: Observer, proceed: Proceed, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return observer.around_function(function, args, kwargs, proceed)
