"""What operations do to shards: one file for each kind, all of them in one read-only mapping."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from lightning_3d.shards.rules import (
    attention,
    contractions,
    dropout,
    embedding,
    history,
    indexing,
    joining,
    loss,
    normalisation,
    pointwise,
    reductions,
    shapes,
)
from lightning_3d.shards.rules.table import RuleTable


def _merged(*tables: RuleTable) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    rules: dict[Callable[..., Any], Callable[..., Any]] = {}
    for table in tables:
        for function, rule in table.items():
            assert function not in rules, f"two rules for {function}"
            rules[function] = rule
    return MappingProxyType(rules)


RULES = _merged(
    attention.table,
    contractions.table,
    dropout.table,
    embedding.table,
    history.table,
    indexing.table,
    joining.table,
    loss.table,
    normalisation.table,
    pointwise.table,
    reductions.table,
    shapes.table,
)
# Attributes of a tensor that are operations.
PROPERTIES = shapes.PROPERTIES
