"""The versions that are required and those that were tested; a contract test holds them to the project's files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from packaging.version import Version

from lightning_3d.doctor.findings import Finding, note, ok, problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """A package: the oldest version that works, the tested one, and the extra that brings it if it is optional."""

    name: str
    minimum: str
    tested: str
    extra: str = ""


PYTHON: Final = Requirement(name="python", minimum="3.10", tested="3.11")
PACKAGES: Final = (
    Requirement(name="torch", minimum="2.11", tested="2.13.0"),
    Requirement(name="lightning", minimum="2.6", tested="2.6.6"),
    Requirement(name="torchmetrics", minimum="1.4", tested="1.9.0"),
    Requirement(name="hydra-core", minimum="1.3", tested="1.3.8"),
    Requirement(name="omegaconf", minimum="2.3", tested="2.3.1"),
    Requirement(name="numpy", minimum="1.26", tested="2.4.6"),
    Requirement(name="transformers", minimum="5.0", tested="5.24.0", extra="hf"),
    Requirement(name="matplotlib", minimum="3.8", tested="3.11.2", extra="plot"),
)


def check_versions(installed: Mapping[str, str | None], requirements: Sequence[Requirement]) -> list[Finding]:
    """Compares installed versions with the required and the tested ones.

    Args:
        installed: Package name to version, None if it is not installed.
        requirements: What to compare with.
    """
    return [_check_version(requirement, installed.get(requirement.name)) for requirement in requirements]


def _check_version(needed: Requirement, version: str | None) -> Finding:
    if version is None:
        what = f"{needed.name} is not installed"
        if needed.extra:
            return note(f"{what} (optional)", f"pip install 'lightning-3d[{needed.extra}]'")
        return problem(what, f"pip install '{needed.name}>={needed.minimum}'")
    found, tested = Version(version), Version(needed.tested)
    if found < Version(needed.minimum):
        upgrade = f"pip install '{needed.name}>={needed.minimum}'"
        fix = upgrade if needed is not PYTHON else f"make the environment with Python {needed.tested}"
        return problem(f"{needed.name} {version} is older than {needed.minimum}", fix)
    if found.release[: len(tested.release)] > tested.release:
        return note(f"{needed.name} {version} is newer than the tested {needed.tested}")
    same = found.release[: len(tested.release)] == tested.release
    return ok(f"{needed.name} {version}" + ("" if same else f" (tested with {needed.tested})"))
