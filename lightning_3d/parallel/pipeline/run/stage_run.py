"""One run of the user's step on one stage, for one micro-batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_3d.errors import ModuleError, PlanError, user_line
from lightning_3d.graph.calls import Call
from lightning_3d.parallel.pipeline.plan import Stage
from lightning_3d.parallel.pipeline.record.hidden import (
    Function,
    HiddenValues,
    counted,
    leaves,
    mapped,
    numbered,
    written,
)
from lightning_3d.parallel.pipeline.record.step import (
    ArgumentLeaf,
    CallRecord,
    ConstantLeaf,
    Origin,
    StepRecord,
    Structure,
    Value,
)
from lightning_3d.parallel.pipeline.run.functions import (
    ContainerFunctions,
    asks_for_device,
    checkpointed_region,
    is_absent,
)
from lightning_3d.parallel.pipeline.run.parts import local_part, unwatched, watched, with_part
from lightning_3d.parallel.pipeline.run.placeholder import (
    Placeholder,
    StageExit,
    about,
    made_again,
    refuse,
    resolve,
    tells_about,
    values_of,
)
from lightning_3d.parallel.pipeline.run.site import Site
from lightning_3d.shards.partial import PartialTensor
from lightning_3d.shards.tensor import ShardTensor

_Result = TypeVar("_Result")


class StageRun:
    """Runs the step of a micro-batch from where a stage begins to where it ends.

    Before the stage begins, modules are not run and hidden values are placeholders; what works on the batch alone is
    computed as always. Where it begins, placeholders are bound to what was received. At the first block of the next
    stage the step is left.

    Attributes:
        began: Whether the stage has begun.

    Args:
        site: What all runs know.
        stage: The stage.
        received: What the stage before sent, in the order of the record.
        record: What the step does with an input of this kind.
    """

    def __init__(self, site: Site, stage: Stage, received: Sequence[Tensor], record: StepRecord) -> None:
        self._site = site
        self._stage = stage
        self._received = received
        self._record = record
        self._is_last = stage.end == len(record.blocks)
        self._incoming: tuple[Value, ...] = record.boundaries[stage.first] if stage.first else ()
        self._outgoing: tuple[Value, ...] = () if self._is_last else record.boundaries[stage.end]
        self._values = HiddenValues()
        self._position = 0
        self.began = not stage.first
        self._outputs: tuple[Tensor, ...] | None = None
        self._is_inside = self._in_hooks = False
        self._mode = ContainerFunctions(self._function, compiled=site.compiled)
        self._has_shards = site.tensor_group is not None
        self._with_gradients = torch.is_grad_enabled()
        # Checkpoints in which earlier stages' work was passed over.
        self._regions: set[object | None] = set()
        self._zeros: dict[tuple[int, torch.dtype], Tensor] = {}

    def run(self, step: Callable[[], _Result]) -> tuple[Tensor, ...] | _Result:
        """Returns what the next stage is sent, or of the last stage what the step returns.

        Raises:
            ModuleError: The step does something else than what was recorded.
        """
        assert len(self._received) == len(self._incoming), "one tensor for each value of the boundary"
        try:
            with self._mode:
                output = step()
        except StageExit:
            pass
        if self._outputs is not None:
            return self._outputs
        if self._position < self._stage.end or not self._is_last:
            raise ModuleError(
                f"the step ends before {self._record.blocks[self._position]} is called, which it called when it was "
                "recorded with an input of this kind.",
                fix="let the path through the blocks depend on shapes of the batch only",
            )
        return resolve(output)  # type: ignore[no-any-return]

    # ---- modules ----

    def call(self, name: str, call: Call) -> Any:
        """Returns what a call of a watched module returns on this stage, which may be placeholders."""
        if self._is_inside:
            return call()
        self._leave_if_done()
        if self._position < len(self._record.blocks) and name in self._record.named:
            self._begin_block(name)
        return self._owned(name, call) if self.began else self._imagined_call(name, call)

    def _begin_block(self, name: str) -> None:
        due = self._record.blocks[self._position]
        if name != due:
            raise ModuleError(
                f"{name} is called at {user_line()} where {due} was called when the step was recorded with an input "
                "of this kind.",
                fix="let the order of the blocks depend on shapes of the batch only",
            )
        ends = self._position == self._stage.end
        begins = self._position == self._stage.first and not self.began
        if begins:
            self._check_checkpoints()
        if begins or ends:
            with self._mode.aside(), torch.set_grad_enabled(self._with_gradients):
                if ends:
                    made = self._values.by_origin()
                    self._outputs = tuple(self._sent(value, made) for value in self._outgoing)
                    raise StageExit
                self._bind()
        self._position += 1

    def _leave_if_done(self) -> None:
        # A step that catches everything goes on after its end.
        if self._outputs is not None:
            raise StageExit

    def _owned(self, name: str, call: Call) -> Any:
        if self._stage.index not in self._site.plan.modules[name]:
            raise PlanError(
                f"{name} is called at {user_line()} on stage {self._stage.index}, and was not when the plan was made.",
                fix="let which modules are called depend on shapes of the batch only",
            )
        args, kwargs = values_of((call.args, call.kwargs), name)
        if self._has_shards:
            unwatched((args, kwargs))
        # On the last stage nobody asks where a value comes from.
        arguments = [] if self._is_last else leaves((args, kwargs))
        number = self._values.count(name)
        self._is_inside = True
        try:
            with self._mode.aside(), self._heard(name, number, arguments):
                output = call.function(*args, **kwargs)
        finally:
            self._is_inside = False
        if not self._is_last:
            if self._has_shards:
                watched((args, kwargs, output))
            origin = Origin(kind="module", maker=name, call=number)
            self._values.made_by_call(origin, output, self._position, arguments)
        return output

    def _heard(self, name: str, number: int, arguments: Sequence[Any]) -> AbstractContextManager[None]:
        recorded = self._record.of_call.get((name, number))
        if self._is_last or recorded is None or not recorded.inside:
            return nullcontext()

        def returned(inner: str, output: Any) -> None:
            origin = Origin(kind="hook", maker=inner, call=self._values.count(inner))
            self._values.made_by_call(origin, watched(output), self._position, arguments)

        return self._site.hooks.heard(tuple(dict.fromkeys(inner for inner, _, _ in recorded.inside)), returned)

    def _imagined_call(self, name: str, call: Call) -> Any:
        """Returns placeholders for what a module returns that an earlier stage runs, and calls the user's hooks."""
        number = self._values.count(name)
        recorded = self._record.of_call.get((name, number))
        # The order of blocks is known to be right.
        if recorded is None or (name not in self._record.named and recorded.position != self._position):
            raise ModuleError(
                f"{name} is called at {user_line()}, and was not when the step was recorded with an input of this "
                "kind.",
                fix="let which modules are called depend on shapes of the batch only",
            )
        self._regions.add(checkpointed_region())
        self._site.skip(name)
        arguments = leaves((call.args, call.kwargs))
        origin = Origin(kind="module", maker=name, call=number)
        output = self._imagined_output(recorded.output, origin, arguments)
        self._call_hooks(name, call, recorded, output, arguments)
        self._values.made_by_call(origin, output, self._position, arguments)
        return output

    def _call_hooks(self, name: str, call: Call, recorded: CallRecord, output: Any, arguments: Sequence[Any]) -> None:
        outer = leaves(output)
        # The module that runs calls its hooks unwatched, so nothing in them may be counted here.
        self._in_hooks = True
        try:
            for inner, _, structure in recorded.inside:
                origin = Origin(kind="hook", maker=inner, call=self._values.count(inner))
                returned = self._imagined_output(structure, origin, arguments, outer)
                self._values.made_by_call(origin, returned, self._position, arguments)
                self._site.hooks.call(inner, (), {}, returned)
            self._site.hooks.call(name, call.args, call.kwargs, output)
        finally:
            self._in_hooks = False

    def _imagined_output(
        self, structure: Structure, origin: Origin, arguments: Sequence[Any], outer: Sequence[Any] | None = None
    ) -> Any:
        parts: list[Any] = []
        for index, leaf in enumerate(structure.leaves):
            if isinstance(leaf, ArgumentLeaf):
                parts.append(arguments[leaf.index])
            elif isinstance(leaf, ConstantLeaf):
                parts.append(leaf.value)
            elif leaf.same_as is not None:
                parts.append((parts if outer is None else outer)[leaf.same_as])
            else:
                plain = self._nothing(leaf.shape, leaf.dtype)
                parts.append(Placeholder.of(plain, numbered(origin, index), requires_grad=leaf.requires_grad))
        return pytree.tree_unflatten(parts, structure.spec)

    def _nothing(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeros. Nobody looks at their values, so those that are no indices may share memory."""
        key = math.prod(shape), dtype
        # These are no functions of the user's.
        with torch._C.DisableTorchFunction():
            if not dtype.is_floating_point:
                return torch.zeros(shape, dtype=dtype, device=self._site.device)
            if key not in self._zeros:
                self._zeros[key] = torch.zeros(key[0], dtype=dtype, device=self._site.device)
            return self._zeros[key].view(shape)

    # ---- functions ----

    def _function(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._leave_if_done()
        if asks_for_device(function, args):
            return self._site.device
        if tells_about(function):
            return about(function, args, kwargs)
        # On the last stage nothing is sent any more, so nothing has to be found again.
        if self.began and self._is_last:
            args, kwargs = values_of((args, kwargs), function)
            return function(*args, **kwargs)
        if not counted(function, args, kwargs, self._is_hidden):
            return about(function, args, kwargs)
        if self.began:
            args, kwargs = self._real(function, args, kwargs)
            output = function(*args, **kwargs)
        else:
            output = self._imagined(function, args, kwargs)
        if not self._in_hooks:
            self._values.made_by_function(function, args, kwargs, output, self._position)
            if not self.began:
                self._name_origins(output)
        return output

    def _is_hidden(self, value: object) -> bool:
        if isinstance(value, Placeholder) or self._values.find(value) is not None:
            return True
        return self._site.names(value) is not None

    def _real(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        missing = next(filter(is_absent, leaves((args, kwargs))), None)
        if missing is not None:
            raise PlanError(
                f"{getattr(function, '__name__', function)} at {user_line()} uses {self._site.names(missing)} on "
                f"stage {self._stage.index}, and did not when the plan was made.",
                fix="let which parameters are used depend on shapes of the batch only",
            )
        real: tuple[tuple[Any, ...], dict[str, Any]] = values_of((args, kwargs), function)
        return real

    def _imagined(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns placeholders for the result of a function that an earlier stage computes."""
        self._regions.add(checkpointed_region())
        shown: dict[int, Placeholder] = {}
        given = leaves((args, kwargs))
        wanted = torch.is_grad_enabled() and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in given)

        def plain(leaf: Any) -> Any:
            if isinstance(leaf, Placeholder):
                shown[id(leaf.plain)] = leaf
                return leaf.plain
            if is_absent(leaf) or isinstance(leaf, (ShardTensor, PartialTensor)):
                return torch.zeros(tuple(leaf.shape), dtype=leaf.dtype, device=self._site.device)
            return leaf

        with torch.no_grad():
            plain_args, plain_kwargs = mapped(plain, (args, kwargs))
            result = function(*plain_args, **plain_kwargs)
        if result is not None and not any(isinstance(leaf, Tensor) for leaf in leaves(result)):
            raise ModuleError(
                f"{getattr(function, '__name__', function)} at {user_line()} reads values of a hidden state before "
                "the last block; each stage would see others.",
                fix="compute it with tensors (torch.where instead of if), inside a block, or after the last block",
            )
        kept = {id(leaf) for leaf in given}
        writes = bool(written(function, args, kwargs))
        derived = getattr(function, "__name__", "") == "contiguous"

        def stand_in(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or id(leaf) in kept:
                return leaf
            same = shown.get(id(leaf))
            if same is not None and writes:
                same.requires_grad = same.requires_grad or wanted
                return same
            again = made_again(function, args, kwargs) if derived or same is not None else None
            own = leaf if same is None else leaf.detach()
            return Placeholder.of(own, requires_grad=wanted and own.is_floating_point(), again=again)

        return mapped(stand_in, result)

    def _name_origins(self, output: Any) -> None:
        for leaf in leaves(output):
            found = self._values.find(leaf)
            if isinstance(leaf, Placeholder) and found is not None:
                leaf.origin = found.origin

    # ---- the ends of the stage ----

    def _bind(self) -> None:
        made, noted = self._values.by_origin(), list(self._values)
        if self._is_last:
            # What was noted so far has served.
            self._values = HiddenValues()
        for value, tensor in zip(self._incoming, self._received, strict=True):
            placeholder = made.get(value.origin)
            if not isinstance(placeholder, Placeholder):
                raise ModuleError(
                    f"{value.origin} comes from an earlier stage, and on stage {self._stage.index} the step does not "
                    "make it: its code before the blocks does different things on different ranks.",
                    fix="let it depend on the batch only",
                )
            whole = with_part(tensor, value, self._site.tensor_group)
            self._values.made(placeholder.receive(unwatched(whole) if self._is_last else whole), value.origin, 0)
        for hidden in noted:
            self._settle(hidden.value)
        self._zeros.clear()
        self.began = True

    def _settle(self, value: Tensor) -> None:
        """Gives a placeholder its value that is made from received ones."""
        if isinstance(value, Placeholder) and value.again is not None and value.bound is None:
            found = value.again()
            if found is not None:
                value.receive(found)

    def _check_checkpoints(self) -> None:
        region = checkpointed_region()
        if region is not None and region in self._regions:
            raise ModuleError(
                f"torch.utils.checkpoint is around code of several stages, {user_line()}: stage {self._stage.index} "
                "could not run it again in backward.",
                fix="a checkpoint for each block, or activation_checkpointing='full' of the strategy instead, or "
                "another layers_per_stage",
            )

    def _sent(self, value: Value, made: Mapping[Origin, Tensor]) -> Tensor:
        tensor = made.get(value.origin)
        if isinstance(tensor, Placeholder):
            tensor = tensor.bound if tensor.bound is not None else refuse(tensor, f"stage {self._stage.index + 1}")
        if tensor is None:
            raise ModuleError(
                f"stage {self._stage.index} did not compute {value.origin}, which it did when the step was recorded "
                "with an input of this kind.",
                fix="let what is computed depend on shapes of the batch only",
            )
        part = local_part(tensor, value)
        if part.requires_grad and not value.requires_grad:
            raise ModuleError(
                f"{value.origin} needs a gradient, and did not when the step was recorded.",
                fix="freeze and unfreeze parameters between steps, not in them",
            )
        # Torch's stages ask for a gradient of all that they were told of.
        wants = value.requires_grad and not part.requires_grad and torch.is_grad_enabled()
        return part.detach().requires_grad_() if wants else part
