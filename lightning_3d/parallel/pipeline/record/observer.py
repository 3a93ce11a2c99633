"""The recorder as an observer of a fake run: the plan of a pipeline is made from what it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from torch.utils import _pytree as pytree
from torchmetrics import Metric

from lightning_3d.graph.blocks import Stack
from lightning_3d.graph.calls import shadow
from lightning_3d.graph.observer import EndPass, Function, Observer, Proceed, ProceedModule, Scene, ValueRead
from lightning_3d.graph.parameters import ParameterTable
from lightning_3d.parallel.pipeline.owners import parameters_below
from lightning_3d.parallel.pipeline.record.attributes import attributes_explained
from lightning_3d.parallel.pipeline.record.flops import CountsFlops
from lightning_3d.parallel.pipeline.record.leaks import Leaks
from lightning_3d.parallel.pipeline.record.recorder import Recorder
from lightning_3d.parallel.pipeline.record.step import StepRecord
from lightning_3d.parallel.pipeline.stacks import tracked_modules

Step = Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """What is known in one pass only."""

    scene: Scene
    recorder: Recorder
    leaks: Leaks


class PipelineObserver(Observer):
    """Records a step while it runs without values, alone or beside other observers; it stands outermost.

    A list of blocks that the step never calls, as that of a copy of the model, is not cut.

    Args:
        module: The whole module.
        parameters: Its parameters.
        stacks: The lists that are cut.
    """

    def __init__(self, module: LightningModule, parameters: ParameterTable, stacks: Sequence[Stack]) -> None:
        self._module = module
        self._stacks = tuple(stacks)
        self._tracked = tracked_modules(module, stacks)
        self._below = parameters_below(module, self.watched(), parameters)
        self._pass: _Pass | None = None
        self._ended = False
        self._record: StepRecord | None = None

    @property
    def tracked(self) -> tuple[str, ...]:
        """Names of the watched modules beside the blocks."""
        return self._tracked

    @property
    def record(self) -> StepRecord:
        """What the last whole pass has shown."""
        assert self._record is not None, "no step was run"
        return self._record

    @property
    def _now(self) -> _Pass:
        assert self._pass is not None, "a pass has begun"
        return self._pass

    @property
    def _blocks(self) -> frozenset[str]:
        return frozenset(block for stack in self._stacks for block in stack.blocks)

    def heard(self, step: Step) -> Step:
        """Returns a step of which the observer also hears what is logged and what metrics are given.

        Args:
            step: The user's step; the fake run is handed the new one.
        """

        def run() -> Any:
            explained = attributes_explained(self._module, self.watched())
            with explained, self._listening(), CountsFlops(self._now.recorder.add_flops):
                return step()

        return run

    # ---- what the run asks ----

    def watched(self) -> frozenset[str]:
        """Blocks, and the largest modules beside them."""
        return self._blocks.union(self._tracked)

    def must_run(self, block: str) -> bool:
        """Hooks of the user see each block; a step may install them when it first needs what they collect."""
        return any(child._forward_hooks for child in self._module.get_submodule(block).modules())

    def begin(self, scene: Scene) -> None:
        """Begins a new record."""
        self._ended = False
        leaks = Leaks(self._module)
        recorder = Recorder(
            blocks=self._blocks,
            tracked=frozenset(self._tracked),
            parameters=self._below,
            parameter_name=scene.name_of,
            is_foreign_hidden=leaks.is_foreign,
        )
        self._pass = _Pass(scene=scene, recorder=recorder, leaks=leaks)

    def end(self, output: Any) -> bool:
        """Writes the record, and asks for another pass if a list of blocks was never called."""
        recorder = self._now.recorder
        if self._ended:
            return False
        called = tuple(stack for stack in self._stacks if any(map(recorder.has_begun, stack.blocks)))
        if called and called != self._stacks:
            self._tracked += tuple(block for stack in self._stacks if stack not in called for block in stack.blocks)
            self._stacks = called
            return True
        self._record = recorder.finish(output)
        return False

    def repeated(self, block: str, first: str) -> None:
        """What was seen in one block holds for its twin."""
        if block in self._blocks:
            self._now.recorder.repeated(block, first)

    def value_read(self, read: ValueRead) -> bool:
        """Inside modules, and after the last block, there are values; what is not hidden has them everywhere."""
        recorder = self._now.recorder
        if recorder.computes_hidden and not recorder.all_begun:
            recorder.refuse_values(read.function)
        return True

    # ---- what happens ----

    def around_module(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: ProceedModule) -> Any:
        """Notes a call, and what modules inside return whose hooks are the user's."""
        recorder, leaks = self._now.recorder, self._now.leaks
        if name not in self._below:
            return proceed(args, kwargs)
        with self._until_ended():
            output = recorder.call(name, args, kwargs, partial(self._heard_inside, name, proceed))
        if recorder.module is None:
            leaks.left_by(name, self._module.get_submodule(name), recorder.is_known)
        return output

    def around_function(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: Proceed
    ) -> Any:
        """Notes a function."""
        recorder, leaks = self._now.recorder, self._now.leaks
        inside = recorder.module
        if inside is not None:
            leaks.used_inside(pytree.tree_leaves((args, kwargs)), inside, recorder.is_known)
        with self._until_ended():
            output = recorder.function(function, args, kwargs, proceed)
        if inside is None:
            leaks.made_outside(output, recorder.is_known)
        else:
            leaks.made_inside(output, inside)
        return output

    @contextmanager
    def _until_ended(self) -> Iterator[None]:
        """Context that notes that another observer has ended the pass."""
        try:
            yield
        except EndPass:
            self._ended = True
            raise

    def _heard_inside(self, name: str, proceed: ProceedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        recorder, names = self._now.recorder, self._now.scene.modules
        with ExitStack() as at_end:
            for child in self._module.get_submodule(name).modules():
                if child._forward_hooks and names[child] != recorder.module:
                    # After those of the user, so that it sees what they return.
                    heard = child.register_forward_hook(
                        lambda module, _, output: recorder.returned_inside(names[module], output)
                    )
                    at_end.callback(heard.remove)
            return proceed(args, kwargs)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Context in which the module's log and its metrics are heard."""
        module, recorder = self._module, self._now.recorder
        with ExitStack() as at_end:
            at_end.callback(shadow(module, "log", lambda name, value, *args, **kwargs: recorder.used(value)))
            for name, child in module.named_modules():
                if isinstance(child, Metric):
                    for method in ("update", "forward"):
                        heard = partial(self._metric, name, getattr(child, method))
                        at_end.callback(shadow(child, method, heard))
            yield

    def _metric(self, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._now.recorder.measured(name, (args, kwargs))
        return method(*args, **kwargs)
