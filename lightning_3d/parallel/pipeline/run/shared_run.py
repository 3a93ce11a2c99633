"""Running code on all ranks of a pipeline together: each call of a module is computed by the rank that owns it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.errors import ModuleError, user_line
from lightning_3d.graph.calls import Call
from lightning_3d.parallel.pipeline.record.hidden import Function
from lightning_3d.parallel.pipeline.record.recorder import Recorder
from lightning_3d.parallel.pipeline.run.effects import Arguments, Effect
from lightning_3d.parallel.pipeline.run.exchange import Exchange
from lightning_3d.parallel.pipeline.run.functions import ContainerFunctions, asks_for_device, reentrant_checkpoint_runs
from lightning_3d.parallel.pipeline.run.parts import unwatched, watched
from lightning_3d.parallel.pipeline.run.placeholder import resolve, tells_about
from lightning_3d.parallel.pipeline.run.site import Site

_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Answer:
    """What a call has done: its output, what modules with hooks inside it returned, and changes of its arguments."""

    output: Any
    inside: list[tuple[str, Any]]
    effects: list[Effect]


class SharedRun:
    """Runs code on real values on every rank of a pipeline.

    Args:
        site: What all runs know.
        exchange: Between the ranks.
        recorder: Watches, if the step is recorded; then outputs need gradients as they do in training.
    """

    def __init__(self, site: Site, exchange: Exchange, recorder: Recorder | None = None) -> None:
        self._site = site
        self._exchange = exchange
        self._recorder = recorder
        self._with_gradients = recorder is not None and torch.is_grad_enabled()
        self._is_inside = False
        self._parameters: dict[str, Tensor] = {}
        self._mode = ContainerFunctions(self._function, compiled=site.compiled)

    @property
    def is_recorded(self) -> bool:
        """Whether what it does is written down, for stages to do it."""
        return self._recorder is not None

    def run(self, call: Callable[[], _Result]) -> _Result:
        """Returns what the call returns."""
        with torch.set_grad_enabled(self._with_gradients), self._mode:
            return call()

    def call(self, name: str, call: Call) -> Any:
        """Returns what a call of a watched module returns, wherever it is computed."""
        if self._is_inside:
            self._check_present(name)
            return call()

        def computed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self._computed(name, Call(call.function, args, kwargs))

        if self._recorder is None:
            return computed(call.args, call.kwargs)
        self._check_checkpoint(name)
        return self._recorder.call(name, call.args, call.kwargs, computed)

    def _check_checkpoint(self, name: str) -> None:
        if self._with_gradients and not torch.is_grad_enabled() and reentrant_checkpoint_runs():
            raise ModuleError(
                f"a reentrant torch.utils.checkpoint is around {name} ({user_line()}): where a stage begins with it, "
                "no gradient would come back through it.",
                fix="checkpoint(..., use_reentrant=False), or activation_checkpointing='full' of the strategy instead",
            )

    # ---- modules ----

    def _computed(self, name: str, call: Call) -> Any:
        plan = self._site.plan
        owner = plan.stages[plan.modules[name][0]].rank
        # Values of a step on a stage, if that is where they come from.
        call = Call(call.function, *resolve((call.args, call.kwargs)))
        arguments = Arguments(call.args, call.kwargs)
        self._is_inside = True
        try:
            with self._mode.aside():
                if owner == self._site.rank:
                    return self._exchange.send(
                        lambda: self._own(name, call, arguments), paths=lambda: arguments.paths
                    ).output
                return self._others(name, call, arguments, owner)
        finally:
            self._is_inside = False

    def _own(self, name: str, call: Call, arguments: Arguments) -> _Answer:
        inside: list[tuple[str, Any]] = []

        def returned(inner: str, output: Any) -> None:
            inside.append((inner, watched(output)))
            self._note(inner, output)

        hooks = self._site.hooks
        args, kwargs = unwatched((call.args, call.kwargs))
        with hooks.heard(hooks.inside(name), returned):
            output = watched(call.function(*args, **kwargs))
        watched((args, kwargs))
        return _Answer(output, inside, arguments.effects())

    def _others(self, name: str, call: Call, arguments: Arguments, owner: int) -> Any:
        self._site.skip(name)
        answer: _Answer = self._exchange.receive(owner, at=arguments.at)
        arguments.apply(answer.effects)
        for inner, output in answer.inside:
            self._note(inner, output)
            self._site.hooks.call(inner, (), {}, output)
        self._site.hooks.call(name, call.args, call.kwargs, answer.output)
        return answer.output

    def _note(self, inner: str, output: Any) -> None:
        if self._recorder is not None:
            self._recorder.returned_inside(inner, output)

    def _check_present(self, name: str) -> None:
        plan, rank = self._site.plan, self._site.rank
        if any(plan.stages[stage].rank == rank for stage in plan.modules[name]):
            return
        raise ModuleError(
            f"{name} is called inside another module, and lies on another pipeline rank.",
            fix="call it at the level of the modules that hold the blocks",
        )

    # ---- functions ----

    def _function(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if asks_for_device(function, args):
            return self._site.device
        if self._recorder is None:
            return self._with_parameters(function, args, kwargs)
        return self._recorder.function(function, args, kwargs, self._with_parameters)

    def _with_parameters(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not tells_about(function):
            leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            values = {id(leaf): self._everywhere(leaf) for leaf in leaves}
            if any(values[id(leaf)] is not leaf for leaf in leaves):
                args, kwargs = pytree.tree_map_only(Tensor, lambda leaf: values[id(leaf)], (args, kwargs))
        return function(*args, **kwargs)

    def _everywhere(self, leaf: Tensor) -> Tensor:
        """Returns a parameter that not all ranks have, and anything else as it is."""
        name = self._site.names(leaf)
        holding = () if name is None else self._site.plan.ranks_holding(name)
        if name is None or len(set(holding)) == self._site.plan.ranks:
            return leaf
        if name not in self._parameters:
            if holding[0] == self._site.rank:
                value = self._exchange.send(lambda: leaf)
            else:
                value = self._exchange.receive(holding[0])
            self._parameters[name] = leaf if self._site.rank in holding else value
        return self._parameters[name]
