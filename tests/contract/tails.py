"""The tails of the code: the longest things, and what no file may hold."""

import ast
import re
from collections.abc import Callable, Iterator

from tests.contract.sources import functions

FUNCTION_LINES = 60
CLASS_LINES = 350
FILE_LINES = 400

_MUTABLE_NODES = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
# With one of these types mypy refuses every change.
_READ_ONLY = re.compile(r"(Final\[|ClassVar\[)*(Mapping|Sequence|Collection|Set|AbstractSet|Iterable)\[")
_MUTABLE_CALLS = frozenset(
    {"list", "dict", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque", "count", "cycle"}
    | {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "local", "Lock", "RLock", "Event"}
)


def too_long(text: str) -> Iterator[str]:
    """Yields what is longer than its limit."""
    lines = text.count("\n")
    if lines > FILE_LINES:
        yield f"file of {lines} lines, at most {FILE_LINES}"
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from _longer(node, CLASS_LINES)
    for function in functions(tree):
        yield from _longer(function, FUNCTION_LINES)


def global_statements(text: str) -> Iterator[str]:
    """Yields every ``global``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Global):
            yield f"line {node.lineno}: global {', '.join(node.names)}"


def not_annotated(text: str) -> Iterator[str]:
    """Yields every argument and return value without a type; the first argument of a method needs none."""
    for function in functions(ast.parse(text)):
        args = function.args
        named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        for argument in named:
            if argument is not None and argument.annotation is None and argument.arg not in ("self", "cls"):
                yield f"line {function.lineno}: argument {argument.arg} of {function.name}"
        if function.returns is None:
            yield f"line {function.lineno}: return value of {function.name}"


def mutable_state(text: str) -> Iterator[str]:
    """Yields every container that the users of a module or class could change, ``__all__`` aside."""
    tree = ast.parse(text)
    bodies = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for body in bodies:
        for node in body:
            value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
            if value is None or not _is_mutable(value) or _is_read_only(node):
                continue
            name = ast.unparse(_target(node))
            if name != "__all__":
                yield f"line {node.lineno}: {name}: use a tuple, frozenset or MappingProxyType, or type it Mapping[...]"


RULES: tuple[Callable[[str], Iterator[str]], ...] = (too_long, global_statements, not_annotated, mutable_state)


def _longer(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, limit: int) -> Iterator[str]:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if lines > limit:
        yield f"line {node.lineno}: {node.name} has {lines} lines, at most {limit}"


def _is_mutable(value: ast.expr) -> bool:
    if isinstance(value, _MUTABLE_NODES):
        return True
    if isinstance(value, ast.Call):
        called = value.func.attr if isinstance(value.func, ast.Attribute) else getattr(value.func, "id", "")
        return called in _MUTABLE_CALLS
    return False


def _is_read_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and _READ_ONLY.match(ast.unparse(node.annotation)) is not None


def _target(node: ast.stmt) -> ast.expr:
    return node.targets[0] if isinstance(node, ast.Assign) else node.target  # type: ignore[attr-defined]
