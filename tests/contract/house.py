"""The house on one page: floors and rooms in their own first words. ``python -m tests.contract.house`` writes it."""

import ast
from pathlib import Path

from tests.contract.floors import FLOORS, ISLAND, LIBRARY
from tests.contract.sources import ROOT

PAGE = ROOT / "docs" / "house.md"
# What a floor is for, from the top down; as many as there are floors.
_MEANINGS = (
    "the door of `python -m`",
    "the door of the command",
    "around a run",
    "a run: Lightning's hooks, each a few lines calling down",
    "choosing a mesh",
    "the order of composition: make a plan, apply it",
    "dimensions: plan, apply, cost",
    "facts",
    "words: the typed options, without torch",
    "the ground",
)
_HEAD = """# The house

A file imports only lower floors, and names on one floor never import each other ([why](decisions/005-floors.md)); a
test holds both, and this page, against the files. The [map](map.md) has every file.

| floor | room | what |
|---|---|---|
"""
_TAIL = """
`parallel/data`, `parallel/tensor` and `parallel/pipeline` have the same three files in front: `plan.py` (what),
`apply.py` (how), `cost.py` (its price). Streams run one way:

- parameters: options → mesh → graph of the module → plan → apply (stages, tensors, recomputation, compiling, shards,
  values) → optimizers → checkpoint
- a batch: data module → sampler by data rank → micro-batches → stages → result of the step → relay → Trainer →
  callbacks
- a price: each `cost.py` → footprint and traffic → planner → the overrides to paste; dry run and memory monitor check
  the same prediction

Beside the library: `conf/` (groups of options), `recipes/` (whole runs), `tests/` (`unit` mirrors the source, `spmd`
runs on processes, `parity` and `features` are tables, `faults` kills ranks, `contract` holds the rules, `benchmarks`
measures, `documents` makes what these pages show).
"""


def house_text() -> str:
    """Returns the page."""
    rows = []
    for meaning, rooms in zip(_MEANINGS, FLOORS, strict=True):
        rows += [f"| {meaning if room == rooms[0] else ''} | `{room}` | {_words(room)} |" for room in rooms]
    rows.append(f"| an island: plain Lightning, knows nothing of the library | `{ISLAND}` | {_words(ISLAND)} |")
    return _HEAD + "\n".join(rows) + "\n" + _TAIL


def _words(room: str) -> str:
    place = ROOT / LIBRARY / room.replace(".", "/")
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return " ".join((ast.get_docstring(ast.parse(Path(path).read_text())) or "").split("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(house_text())
