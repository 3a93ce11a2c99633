"""Recording a step: what it calls at the level of containers, and which hidden values live between its blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.errors import ModuleError, user_line
from lightning_3d.graph.parameters import class_name
from lightning_3d.graph.places import innermost_call
from lightning_3d.parallel.pipeline.record.hidden import Function, Hidden, HiddenValues, counted, structure, written
from lightning_3d.parallel.pipeline.record.step import CallRecord, Origin, StepRecord, Structure, Value
from lightning_3d.shards.tensor import ShardTensor

ProceedFunction = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
ProceedCall = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_NO_PARAMETERS: Mapping[str, Collection[str]] = MappingProxyType({})
_READERS = frozenset(
    {"__bool__", "is_nonzero", "item", "tolist", "numpy", "__array__", "__dlpack__", "__float__", "__int__"}
    | {"__index__", "__complex__", "equal", "allclose", "nonzero", "argwhere", "unique", "unique_consecutive"}
)
_TENSORS = "compute it with tensors (torch.where instead of if), inside a block, or after the last block"


@dataclass(kw_only=True, slots=True)
class _Inside:
    """What happens inside one call of a watched module that is not its own."""

    name: str
    arguments: list[Any]
    parameters: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)
    values: list[Hidden] = field(default_factory=list)
    # Of modules with hooks of the user: name, number, output.
    outputs: list[tuple[str, int, Any]] = field(default_factory=list)
    flops: float = 0.0


def _never(value: Tensor) -> bool:
    return False


class Recorder:
    """Watches one run of a step and writes its record.

    Args:
        blocks: Names of the blocks.
        tracked: Names of the other modules whose calls are watched at the level of containers.
        parameters: First names of the parameters below each block and watched module.
        parameter_name: The first name of a parameter, and None for anything else.
        is_foreign_hidden: Whether a tensor that nobody is known to have made is hidden.
    """

    def __init__(
        self,
        *,
        blocks: frozenset[str],
        tracked: frozenset[str],
        parameters: Mapping[str, Collection[str]] = _NO_PARAMETERS,
        parameter_name: Callable[[object], str | None],
        is_foreign_hidden: Callable[[Tensor], bool] = _never,
    ) -> None:
        self._blocks = blocks
        self._tracked = tracked | blocks
        self._held = parameters
        self._parameter_name = parameter_name
        self._is_foreign_hidden = is_foreign_hidden
        self._order: list[str] = []
        self._calls: list[CallRecord] = []
        self._parameters: dict[str, set[int]] = defaultdict(set)
        self._modules: dict[str, set[int]] = defaultdict(set)
        self._flops = [0.0] * (len(blocks) + 1)
        self._values = HiddenValues(watch_memory=True)
        self._inside: _Inside | None = None
        self._shown: dict[str, _Inside] = {}
        self._computes_hidden = False

    @property
    def position(self) -> int:
        """Blocks that have begun."""
        return len(self._order)

    @property
    def module(self) -> str | None:
        """The watched module that runs, or None at the level of containers."""
        return None if self._inside is None else self._inside.name

    @property
    def all_begun(self) -> bool:
        """Whether the last block has begun: from then on everything happens on the last stage."""
        return self.position == len(self._blocks)

    @property
    def computes_hidden(self) -> bool:
        """Whether a counted function runs at the level of containers."""
        return self._computes_hidden

    def has_begun(self, block: str) -> bool:
        """Returns whether a block was called."""
        return block in self._order

    def is_known(self, value: object) -> bool:
        """Returns whether a value is hidden and somebody is known to have made it, or a parameter."""
        return self._values.find(value) is not None or self._parameter_name(value) is not None

    def add_flops(self, count: float, operation: str = "") -> None:
        """Counts floating point operations of the moment, whatever computes them."""
        self._flops[self.position] += count
        if self._inside is not None:
            self._inside.flops += count

    # ---- modules ----

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: ProceedCall) -> Any:
        """Makes and notes a call of a module.

        Args:
            name: Its name.
            args: Its arguments.
            kwargs: Its keyword arguments.
            proceed: Computes the output.

        Raises:
            ModuleError: The call is one that stages cannot share out.
        """
        if self._inside is not None:
            return self._nested(name, args, kwargs, proceed)
        if name not in self._tracked:
            return proceed(args, kwargs)
        position = self.position
        if name in self._blocks:
            self._begin(name)
        arguments = pytree.tree_leaves((args, kwargs))
        self._use(arguments)
        number = self._values.count(name)
        self._called(name)
        self._inside = inside = _Inside(name=name, arguments=arguments)
        try:
            output = proceed(args, kwargs)
        finally:
            self._inside = None
        self._shown[name] = inside
        self._values.made_by_call(Origin(kind="module", maker=name, call=number), output, self.position, arguments)
        self._calls.append(
            CallRecord(
                module=name,
                call=number,
                position=position,
                output=structure(output, arguments),
                inside=self._noted(inside, output),
            )
        )
        return output

    def repeated(self, block: str, first: str) -> None:
        """Notes for the block that runs what was seen inside another one that does the same."""
        shown = self._shown[first]
        for name in shown.parameters.difference(self._held.get(first, ())):
            self._parameters[name].add(self.position)
        for name in shown.modules:
            self._called(name)
        for value in shown.values:
            value.used = max(value.used, self.position)
        self.add_flops(shown.flops)

    def _begin(self, block: str) -> None:
        if block in self._order:
            again = "the whole stack is" if self.all_begun else f"{block} is"
            raise ModuleError(
                f"{again} called twice in one step ({user_line()}), and a pipeline passes each block once.",
                fix="call it once on the joined inputs, or leave pipeline_parallel_size=1",
            )
        self._order.append(block)

    def _called(self, name: str) -> None:
        self._modules[name].add(self.position)
        for parameter in self._held.get(name, ()):
            self._parameters[parameter].add(self.position)

    def _nested(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: ProceedCall) -> Any:
        inside = self._inside
        assert inside is not None
        if name in self._blocks:
            raise ModuleError(
                f"{name} is called inside {inside.name} ({user_line()}), so no stage could begin with it.",
                fix="pipeline_stack=<the list whose blocks are called one after the other>",
            )
        if name in self._tracked:
            inside.modules.add(name)
            self._called(name)
        return proceed(args, kwargs)

    def returned_inside(self, name: str, output: Any) -> None:
        """Notes what a module inside the running one returned that has forward hooks of the user."""
        assert self._inside is not None
        number = self._values.count(name)
        self._values.made_by_call(
            Origin(kind="hook", maker=name, call=number), output, self.position, self._inside.arguments
        )
        self._inside.outputs.append((name, number, output))

    def _noted(self, inside: _Inside, output: Any) -> tuple[tuple[str, int, Structure], ...]:
        outer = pytree.tree_leaves(output)
        return tuple(
            (name, number, structure(returned, inside.arguments, outer)) for name, number, returned in inside.outputs
        )

    # ---- functions ----

    def function(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: ProceedFunction
    ) -> Any:
        """Makes and notes a call of a function of torch, wherever it happens.

        Raises:
            ModuleError: The function does at the level of containers what only one rank could do.
        """
        if self._inside is not None:
            self._use_inside(pytree.tree_leaves((args, kwargs)))
            return proceed(function, args, kwargs)
        if not counted(function, args, kwargs, self._is_hidden):
            return proceed(function, args, kwargs)
        self._use(pytree.tree_leaves((args, kwargs)))
        self._check(function, args, kwargs)
        self._computes_hidden = True
        try:
            output = proceed(function, args, kwargs)
        finally:
            self._computes_hidden = False
        self._values.made_by_function(function, args, kwargs, output, self.position)
        return output

    def used(self, values: Any) -> None:
        """Notes values that are logged or given to a metric: they are needed at the end of the step."""
        self._use(pytree.tree_leaves(values), at=len(self._blocks))

    def kept(self, values: Any) -> None:
        """Notes values that the step has left in attributes, which are those of the last stage."""
        found = map(self._values.find, pytree.tree_leaves(values))
        self.used([hidden.value for hidden in found if hidden is not None and not hidden.stale])

    def measured(self, metric: str, values: Any) -> None:
        """Notes what a metric is given.

        Args:
            metric: Its name.
            values: Its arguments.

        Raises:
            ModuleError: Values that later blocks would have to wait for are hidden ones.
        """
        if self._inside is not None:
            return
        if not self.all_begun and any(map(self._is_hidden, pytree.tree_leaves(values))):
            raise ModuleError(
                f"the metric {metric} is given hidden values in {_place()} before the last block, and only the last "
                "stage keeps metrics.",
                fix="update it after the last block",
            )
        self.used(values)

    def refuse_values(self, what: str) -> NoReturn:
        """Refuses a step that reads values of a hidden state.

        Args:
            what: The function that reads.
        """
        raise ModuleError(
            f"{what} in {_place()} reads values of a hidden state before the last block; each stage would see others.",
            fix=_TENSORS,
        )

    def _is_hidden(self, value: object) -> bool:
        if self.is_known(value):
            return True
        return isinstance(value, Tensor) and self._is_foreign_hidden(value)

    def _use_inside(self, leaves: list[Any]) -> None:
        inside = self._inside
        assert inside is not None
        for leaf in leaves:
            name = self._parameter_name(leaf)
            if name is not None:
                inside.parameters.add(name)
                self._parameters[name].add(self.position)
            hidden = self._find(leaf)
            if hidden is not None and max(hidden.position, hidden.used) < self.position:
                inside.values.append(hidden)
                hidden.used = self.position

    def _use(self, leaves: list[Any], at: int | None = None) -> None:
        position = self.position if at is None else at
        for leaf in leaves:
            name = self._parameter_name(leaf)
            if name is not None:
                self._parameters[name].add(self.position)
            hidden = self._find(leaf)
            if hidden is not None:
                hidden.used = max(hidden.used, position)
            elif name is None and isinstance(leaf, Tensor) and self._is_foreign_hidden(leaf) and not self.all_begun:
                raise ModuleError(
                    f"a hidden value comes to {_place()} from nowhere: code that torch does not show made it, or "
                    "it left a module as an attribute.",
                    fix="return it from the module, or compute it inside a module",
                )

    def _find(self, value: object) -> Hidden | None:
        hidden = self._values.find(value)
        if hidden is not None and hidden.stale:
            raise ModuleError(
                f"{hidden.origin} is used in {_place()} after another view of its memory was written to, which on "
                "another stage is a tensor of its own.",
                fix="make a new tensor instead of writing in place",
            )
        return hidden

    def _check(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.all_begun:
            return
        name = getattr(function, "__name__", "")
        if name in _READERS:
            self.refuse_values(name)
        if not all(map(self._is_hidden, written(function, args, kwargs))):
            raise ModuleError(
                f"{name} in {_place()} writes a hidden value into a tensor that has none; on other stages it would "
                "be missing there.",
                fix="make a new tensor instead (x = x + h, torch.cat, torch.stack), or do it inside a module",
            )

    # ---- the end ----

    def finish(self, output: Any) -> StepRecord:
        """Returns the record of the step.

        Args:
            output: What the step returned.

        Raises:
            ModuleError: A block was not called.
        """
        missing = sorted(self._blocks - set(self._order))
        if missing:
            raise ModuleError(
                f"the step does not call {missing[0]}"
                + (f" and {len(missing) - 1} others" if missing[1:] else "")
                + ", and a pipeline passes each block once.",
                fix="pipeline_stack=<the lists whose blocks every step calls>",
            )
        self.used(output)
        count = len(self._order)
        return StepRecord(
            blocks=tuple(self._order),
            calls=tuple(self._calls),
            boundaries=tuple(self._boundary(block) for block in range(count)),
            parameters={name: frozenset(found) for name, found in self._parameters.items()},
            modules={name: frozenset(found) for name, found in self._modules.items()},
            flops=tuple(self._flops),
        )

    def _boundary(self, block: int) -> tuple[Value, ...]:
        return tuple(_value(hidden) for hidden in self._values if hidden.position <= block < hidden.used)


def _value(hidden: Hidden) -> Value:
    tensor, cut = hidden.value, isinstance(hidden.value, ShardTensor)
    return Value(
        origin=hidden.origin,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        # The output of an autograd function of the user's is first seen without a graph.
        requires_grad=hidden.requires_grad or tensor.requires_grad,
        layout=tensor.cut if isinstance(tensor, ShardTensor) else None,
        tensor_ranks=tensor._group.size if cut else 1,  # type: ignore[attr-defined]
    )


def _place() -> str:
    call = innermost_call()
    return f"{'the step' if call is None else class_name(call.function)} ({user_line()})"  # type: ignore[arg-type]
