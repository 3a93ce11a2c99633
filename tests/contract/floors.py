"""The floors of the house, as data, and the rule that a file imports only lower floors."""

import ast
from collections.abc import Iterator, Mapping

LIBRARY = "lightning_3d"

# From the top down; names on one line never import each other.
FLOORS = (
    ("__main__",),
    ("cli",),
    ("train", "callbacks", "doctor", "verify", "convert"),
    ("strategy", "dryrun"),
    ("planner",),
    ("plan",),
    ("parallel.data", "parallel.tensor", "parallel.pipeline", "checkpoint", "gradients", "initial", "faults"),
    ("mesh", "graph", "precision", "cost", "shards", "random", "counters", "batches"),
    ("config", "pictures", "wire"),
    ("errors", "log", "units"),
)
# Imports nothing of the library, and nothing of the library imports it.
ISLAND = "reference"
# The floors that must answer before torch is imported.
WITHOUT_TORCH = ("__main__", "cli", "config", "errors", "log", "pictures", "units", "wire")
TORCH = ("torch", "lightning", "torchmetrics")

_LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}


def floor_of(module: str) -> str | None:
    """Returns the name on the floors that a module belongs to; None if it stands on none.

    ``lightning_3d.parallel.data.plan`` is of ``parallel.data``.
    """
    parts = module.split(".")[1:]
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in _LEVEL or name == ISLAND), None)


def violations(sources: Mapping[str, str]) -> list[str]:
    """Returns one line for every import that climbs, or crosses, or touches the island.

    Args:
        sources: Dotted module name to its text; packages under their own name. Imports are absolute (ruff's TID).
    """
    found = []
    for module, text in sources.items():
        tree = ast.parse(text)
        targets = sorted(set(_imported(tree, sources)))
        # The package itself is the public door and may name any of its rooms; folders that hold rooms hold no code.
        if module == LIBRARY:
            continue
        if floor_of(module) is None:
            if targets or not _is_only_docstring(tree):
                found.append(f"{module} stands on no floor")
            continue
        found += [f"{module} imports {target}" for target in targets if not _may_import(module, target)]
        if floor_of(module) in WITHOUT_TORCH:
            found += [f"{module} imports {name}" for name in _foreign(tree) if name in TORCH]
    return found


def _may_import(module: str, target: str) -> bool:
    own, other = floor_of(module), floor_of(target)
    if own == other:
        return True
    if target == f"{LIBRARY}.__version__":
        return True
    if own is None or other is None or ISLAND in (own, other):
        return False
    return _LEVEL[other] > _LEVEL[own]


def _imported(tree: ast.AST, sources: Mapping[str, str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == LIBRARY)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == LIBRARY:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in sources or node.module == LIBRARY else node.module


def _foreign(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def _is_only_docstring(tree: ast.Module) -> bool:
    return all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in tree.body)
