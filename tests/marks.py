"""Marks of tests."""

from __future__ import annotations

from typing import Any

import pytest


def more(*values: Any) -> Any:
    """Returns a case of a parametrized test that only ``make test-all`` runs: others show the same in less time."""
    return pytest.param(*values, marks=pytest.mark.thorough)
