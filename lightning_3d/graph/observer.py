"""What may watch a fake run: the contract between the run and those who plan from what they see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_3d.graph.calls import Call

Function = Callable[..., Any]
Proceed = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
ProceedModule = Callable[[tuple[Any, ...], dict[str, Any]], Any]


class EndPass(BaseException):
    """Raised by an observer that has seen enough of a pass; `Observer.end` is called all the same.

    No `Exception`, so that a step's own ``except`` does not swallow it.
    """


@dataclass(kw_only=True, slots=True)
class Scene:
    """What all observers know of the run.

    Attributes:
        parameters: The first name of each parameter, by the id of the fake one that stands for it.
        modules: The name of each module, the root's is "".
        blocks: The names of all blocks.
        block: The block that is running, or None at the level of its containers.
    """

    parameters: Mapping[int, str]
    modules: Mapping[nn.Module, str]
    blocks: frozenset[str]
    block: str | None = None

    def name_of(self, value: object) -> str | None:
        """Returns the first name of a parameter, and None for anything else."""
        return self.parameters.get(id(value))


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueRead:
    """A step wants the values of a tensor that has none.

    Attributes:
        function: Name of the function that reads.
        module: Name of the innermost module that runs; "" outside of all, as for the root.
        call: How that module was called.
        line: File and line of the code that reads.
    """

    function: str
    module: str
    call: Call | None
    line: str


class Observer:
    """Watches a fake run. Each method that is not overridden lets things pass.

    Tensors are told apart by identity: a tensor object is alive for a whole pass. Methods that begin with "around"
    decide what is computed: they call ``proceed`` with the same or other arguments, and return its result or another.
    The first observer of a run stands outermost.
    """

    def watched(self) -> frozenset[str]:
        """Returns the names of modules whose calls it wants to see, besides blocks, their containers and neighbours."""
        return frozenset()

    def tells_apart(self, block: str) -> object:
        """Returns what must be equal, besides all that the run compares, for one block to stand for another."""
        return None

    def must_run(self, block: str) -> bool:
        """Returns whether a call of a block has to be computed, though it may look like one before."""
        return False

    def begin(self, scene: Scene) -> None:
        """Called before each pass."""

    def around_function(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: Proceed
    ) -> Any:
        """Called for each function of torch that the step calls, in containers and in blocks."""
        return proceed(function, args, kwargs)

    def around_module(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], proceed: ProceedModule) -> Any:
        """Called for each call of a watched module, outside of its hooks; for blocks that repeat another too."""
        return proceed(args, kwargs)

    def repeated(self, block: str, first: str) -> None:
        """Called in place of all that happens inside a block, if ``first`` has shown it in this pass."""

    def value_read(self, read: ValueRead) -> bool:
        """Returns whether the pass may go on with a made-up value; may raise an error of its own."""
        return False

    def end(self, output: Any) -> bool:
        """Returns whether another pass is needed.

        Args:
            output: What the step returned; None for a pass that was ended.
        """
        return False
