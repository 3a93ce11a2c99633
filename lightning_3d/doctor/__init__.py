"""``lightning-3d doctor``: looks at the environment and says what to change before a run fails on it.

``facts`` looks, ``checks`` judges (pure functions), ``findings`` prints. Asked to, ``measurement`` takes the times of a
mesh: ``processes`` starts ranks, ``rank`` is what each of them does, ``speeds`` are the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_3d.doctor.checks import check_all
from lightning_3d.doctor.facts import Facts, gather
from lightning_3d.doctor.findings import Finding, Level, table
from lightning_3d.log import process_rank

__all__ = ["Finding", "Level", "run"]


def run(arguments: Sequence[str]) -> int:
    """Prints what is found here and how to mend it, and measures if it is asked to.

    Args:
        arguments: The words after ``doctor``: Hydra's overrides, among them ``measure=true``.

    Returns:
        The exit code: 1 if there is a problem, else 0.

    Raises:
        Lightning3DError: The configuration is impossible, or a measurement failed.
    """
    # Without words no configuration is needed: an environment may be too broken to compose one.
    return _measured(arguments) if arguments else _told(gather())


def _told(facts: Facts, findings: Sequence[Finding] = ()) -> int:
    """Prints the findings about the environment, and others; on the first rank."""
    found = [*check_all(facts), *findings]
    if process_rank() == 0:
        print(table(found))
    return int(any(finding.level is Level.PROBLEM for finding in found))


def _measured(arguments: Sequence[str]) -> int:
    from lightning_3d.config.compose import composed

    cfg = composed(arguments, "doctor")
    if cfg is None:
        return 0
    facts = gather()
    if not cfg.measure:
        return _told(facts)
    # What is misspelt should not wait for torch to be imported.
    from lightning_3d.doctor.measurement import measurement, write_cluster

    answer = measurement(cfg, facts.memory.free)
    if answer is None:
        return 0
    code = _told(facts, answer.findings)
    print(f"\n{answer.measured}")
    if answer.cluster is not None:
        print(write_cluster(answer.cluster, cfg.cluster_file))
    return code
