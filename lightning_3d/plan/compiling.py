"""Compiled blocks where no tensor is cut: what each computes, inside of its hooks, which the data axis works by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from torch._dynamo import OptimizedModule

from lightning_3d.graph.blocks import outwards, parents
from lightning_3d.graph.calls import Call, Handler, around_forward
from lightning_3d.graph.compiled import is_compiled
from lightning_3d.graph.compiling import compiled
from lightning_3d.parallel.tensor.doors import Through

# Returns a function that is compiled when it is called.
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]


class CompiledForward:
    """The ``forward`` of a block, compiled when it is called; a handler of `lightning_3d.graph.calls.around_forward`.

    Blocks of one class whose attributes are alike share what was compiled.

    Args:
        compiler: Compiles it.
        through: Activation checkpointing, compiled with the block: what is kept is then decided for its graph.
    """

    def __init__(self, compiler: Compiler, through: Through | None = None) -> None:
        self._compiler = compiler
        self._through = through
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, call: Call) -> Any:
        """Makes the call."""
        if self._compiled is None:
            self._compiled = self._compiler(_checkpointed(call.function, self._through))
        return self._compiled(*call.args, **call.kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        """A copy of the block compiles its own ``forward``."""
        return CompiledForward(self._compiler, self._through)


def compile_blocks(
    module: nn.Module, blocks: Iterable[str], watched: Iterable[str], through: Through | None, *, wanted: bool
) -> frozenset[str]:
    """Has blocks be compiled; returns the names of those that are.

    Left out are those that their author has compiled, and those that hold something watched, whose calls go through
    handlers that nothing can compile. Those in a module that is compiled are compiled in its stead, see `as_it_is`.

    Args:
        module: Holds the blocks.
        blocks: Their names.
        watched: Names of all parts whose calls are watched.
        through: What blocks compute again in backward.
        wanted: Whether all others are compiled too.
    """
    holding = parents(watched)
    found = set[str]()
    for name in blocks:
        block = module.get_submodule(name)
        compiler = compiled if wanted else _compiler_around(module, name)
        if compiler is not None and name not in holding and not is_compiled(block):
            around_forward(block, CompiledForward(compiler, through))
            found.add(name)
    return frozenset(found)


def as_it_is(module: nn.Module, handler: Handler) -> Handler:
    """Returns a handler that has a module that its author has compiled run as it is.

    Dynamo would break its graph at every part inside that is watched.

    Args:
        module: Holds such parts.
        handler: Handles its calls.
    """
    if not is_compiled(module):
        return handler

    def uncompiled(call: Call) -> Any:
        # That of the call, which may be a copy of the module.
        called = call.function.__self__  # type: ignore[attr-defined]
        plain = called._orig_mod if isinstance(called, OptimizedModule) else called._call_impl
        return handler(Call(plain, call.args, call.kwargs))

    return uncompiled


def _compiler_around(module: nn.Module, name: str) -> Compiler | None:
    """What has compiled the innermost module around a part; one that was compiled in place does not tell how."""
    found = next(filter(is_compiled, map(module.get_submodule, (*outwards(name), ""))), None)
    if isinstance(found, OptimizedModule):
        compiler: Compiler = found.dynamo_ctx
        return compiler
    return None if found is None else compiled


def _checkpointed(forward: Callable[..., Any], through: Through | None) -> Callable[..., Any]:
    if through is None:
        return forward
    return partial(_run_through, forward, through)


def _run_through(forward: Callable[..., Any], through: Through, *args: Any, **kwargs: Any) -> Any:
    return through(lambda given, named: forward(*given, **named), args, kwargs)
