"""The program of a block: a function of plain tensors, and what reads them and puts the result together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import TorchDynamoException

from lightning_3d.graph.compiling import compiled
from lightning_3d.parallel.tensor.replay.results import Results
from lightning_3d.parallel.tensor.replay.writer import Constants, Writer, define, sequence_text, write_function
from lightning_3d.shards.tensor import ShardTensor

Read = Callable[[nn.Module, str], Tensor]
# Calls that act on more than tensors.
_NOT_COMPILED: Mapping[str, str] = MappingProxyType(
    {
        "update_cache": "it fills a key-value cache, which model.config.use_cache = False spares it",
        **dict.fromkeys(
            ("dropout_part", "attention_with_dropout", "random_part"), "it draws random numbers for cut tensors"
        ),
    }
)
Form = tuple[Any, ...]


class Body:
    """The operations of one or several equal blocks.

    Attributes:
        text: Its source.
        function: Runs it on plain tensors and returns one or a tuple of them.
        best: The same, compiled where that was asked for and possible.
        problem: Why it could not be compiled.
    """

    __slots__ = ("best", "function", "problem", "text")

    def __init__(self, text: str, function: Callable[..., Any]) -> None:
        self.text = text
        self.function = self.best = function
        self.problem: str | None = None

    def compile(self, backend: str | None) -> None:
        """Has it compiled in one graph at its next call; if that fails it goes on as it is."""
        hindrance = next((why for call, why in _NOT_COMPILED.items() if f"{call}(" in self.text), None)
        self.problem = self.problem or hindrance
        if self.problem is None and self.best is self.function:
            self.best = self._guarded(compiled(self.function, fullgraph=True, dynamic=False, backend=backend))

    @property
    def is_compiled(self) -> bool:
        """Whether its next call is to be a compiled one."""
        return self.best is not self.function

    def plainly(self, run: Callable[[], Any]) -> Any:
        """Makes a call in which it is not compiled."""
        best, self.best = self.best, self.function
        try:
            return run()
        finally:
            self.best = best

    def _guarded(self, fast: Callable[..., Any]) -> Callable[..., Any]:
        def call(*operands: Tensor) -> Any:
            try:
                # Around it the user's own compiled parts run as they are.
                with torch.compiler.set_stance("default"):
                    return fast(*operands)
            except TorchDynamoException as failure:
                self.problem = str(failure).strip().partition("\n")[0]
                self.best = self.function
            return self.function(*operands)

        return call


class Bodies:
    """Bodies of all blocks: equal ones are one, so that they are compiled once."""

    def __init__(self) -> None:
        self._known: dict[Form, Body] = {}

    def body(self, text: str, constants: Mapping[str, Any], form: Form) -> Body:
        """Returns the body with a text.

        Args:
            text: Defines a function ``block``.
            constants: What the text names.
            form: Whatever else must be alike for two bodies to be one.
        """
        key = (text, tuple(constants.values()), form)
        if key not in self._known:
            self._known[key] = Body(text, define(text, "block", constants))
        return self._known[key]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """A tensor that a block has: a parameter, a buffer, an attribute.

    Attributes:
        text: Reads it, from what ``constants`` name.
        constants: By name.
        tensor: What it was when the block was recorded.
        parameter: Whether it is a parameter.
    """

    text: str
    constants: Mapping[str, Any]
    tensor: Tensor
    parameter: bool


def read_leaves(modules: Sequence[nn.Module], read: Read) -> tuple[Leaf, ...]:
    """Returns the tensors of a block, each once.

    Args:
        modules: The block and all that is in it.
        read: Returns the plain local tensor of a parameter.
    """
    found: dict[int, Leaf] = {}
    for index, module in enumerate(modules):
        owner = f"module_{index}"
        for name in present_parameters(module):
            leaf = Leaf(
                text=f"read({owner}, {name!r})",
                constants={"read": read, owner: module},
                tensor=read(module, name),
                parameter=True,
            )
            found.setdefault(id(leaf.tensor), leaf)
        for kind, table in (("buffers", module._buffers), ("attributes", module.__dict__)):
            for name, value in table.items():
                tensor = value._local if isinstance(value, ShardTensor) else value
                if isinstance(tensor, Tensor):
                    text = f"{kind}_{index}[{name!r}]" + ("" if tensor is value else "._local")
                    leaf = Leaf(text=text, constants={f"{kind}_{index}": table}, tensor=tensor, parameter=False)
                    found.setdefault(id(tensor), leaf)
    return tuple(found.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A block for one kind of input.

    Attributes:
        body: Its operations.
        operands: Adds the block's own tensors to what is in the arguments.
        run: Returns the block's result from what is in the arguments.
        changed: Which of the operands the block writes to.
        results_text: How the result is put together.
        results_constants: What that text names.
    """

    body: Body
    operands: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    run: Callable[[tuple[Any, ...]], Any]
    changed: tuple[int, ...]
    results_text: str
    results_constants: Mapping[str, Any]


def write_program(
    writer: Writer,
    *,
    inputs: Sequence[Any],
    leaves: Sequence[tuple[str, Leaf]],
    results: Results,
    constants: Constants,
    changed: Sequence[Tensor],
    grad: bool | None,
    form: Form,
    bodies: Bodies,
) -> Program:
    """Returns the program of a block that was recorded.

    Args:
        writer: Holds the calls.
        inputs: Tensors and caches of the arguments, named ``x0`` and so on.
        leaves: Name and origin of the block's own tensors.
        results: What the block returned.
        constants: What the text of the results names.
        changed: The operands that the block has written to.
        grad: Whether gradients are on around a block that switches them; None if it does not.
        form: What else must be alike for two blocks to share their operations.
        bodies: Those that are known.

    Raises:
        Unwritable: A result has no name.
    """
    names = [writer.tensor(tensor) for tensor in results.tensors]
    returned = names[0] if results.bare else sequence_text(names, str)
    used = {name for step in writer.steps for name in step.reads} | set(names)
    own = [(name, leaf) for name, leaf in leaves if name in used]
    arguments = [f"x{index}" for index in range(len(inputs))]
    text = write_function("block", [*arguments, *(name for name, _ in own)], writer.steps, returned)
    operands = (*inputs, *(leaf.tensor for _, leaf in own))
    body = bodies.body(text, writer.constants.values, (*form, *map(form_of, operands)))
    listed = ", ".join(["*inputs", *(leaf.text for _, leaf in own)])
    tables = {name: value for _, leaf in own for name, value in leaf.constants.items()}
    values = {**constants.values, **tables, "body": body, "set_grad_enabled": torch.set_grad_enabled}
    return Program(
        body=body,
        operands=define(f"def operands(inputs):\n    return ({listed},)\n", "operands", tables),
        run=define(_run_text(listed, results, grad), "run", values),
        changed=tuple(index for index, operand in enumerate(operands) if any(operand is other for other in changed)),
        results_text=results.text,
        results_constants=constants.values,
    )


def _run_text(operands: str, results: Results, grad: bool | None) -> str:
    call = f"body.best({operands})"
    lines = [f"return {call}"] if results.bare else [f"r = {call}", f"return {results.text}"]
    if grad is not None:
        # An exception inside must not leave them switched.
        lines = [f"with set_grad_enabled({grad}):", *(f"    {line}" for line in lines)]
    return "\n    ".join(["def run(inputs):", *lines]) + "\n"


def present_parameters(module: nn.Module) -> list[str]:
    """Returns the names of the parameters that a module has itself."""
    return [name for name, parameter in module._parameters.items() if parameter is not None]


def form_of(operand: Any) -> Form:
    """Returns what a compiled program must know of an operand."""
    if not isinstance(operand, Tensor):
        return (type(operand),)
    return (*operand.shape,), operand.stride(), operand.dtype, operand.device, operand.requires_grad
