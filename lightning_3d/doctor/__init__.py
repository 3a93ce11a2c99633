"""``lightning-3d doctor``: looks at the environment and says what to change before a run fails on it.

``facts`` looks, ``checks`` judges (pure functions), ``findings`` prints.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_3d.doctor.checks import check_all
from lightning_3d.doctor.facts import gather
from lightning_3d.doctor.findings import Finding, Level, table
from lightning_3d.errors import ConfigError

__all__ = ["Finding", "Level", "run"]


def run(arguments: Sequence[str]) -> int:
    """Prints what is found here and how to mend it.

    Args:
        arguments: The words after ``doctor``; it takes none but ``--help``.

    Returns:
        The exit code: 1 if there is a problem, else 0.

    Raises:
        ConfigError: If there are other arguments.
    """
    if list(arguments) in (["--help"], ["-h"]):
        print("usage: lightning-3d doctor\n\nPrints findings and fixes; exit code 1 if there is a problem.")
        return 0
    if arguments:
        raise ConfigError(f"doctor takes no arguments, got {' '.join(arguments)!r}", fix="lightning-3d doctor")
    findings = check_all(gather())
    print(table(findings))
    return int(any(finding.level is Level.PROBLEM for finding in findings))
