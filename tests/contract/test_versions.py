"""The versions stand in three places, for three readers: here they are held together."""

import pytest
import tomllib

from lightning_3d import __version__
from lightning_3d.doctor.versions import PACKAGES, PYTHON, Requirement
from tests.contract.sources import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONSTRAINTS = (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize("needed", PACKAGES, ids=lambda needed: needed.name)
def test_doctor_asks_for_what_the_project_asks_for(needed: Requirement) -> None:
    asked = PROJECT["optional-dependencies"][needed.extra] if needed.extra else PROJECT["dependencies"]
    assert any(line.split(",")[0] == f"{needed.name}>={needed.minimum}" for line in asked)
    assert f"{needed.name}=={needed.tested}" in CONSTRAINTS


def test_python() -> None:
    assert PROJECT["requires-python"] == f">={PYTHON.minimum}"


def test_every_dependency_has_a_tested_version() -> None:
    pinned = {line.split("==")[0] for line in CONSTRAINTS}
    asked = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    plain = [line.split(">=")[0].partition("[")[0] for line in asked if ">=" in line]
    names = {name.replace("typing-extensions", "typing_extensions") for name in plain}
    assert names - pinned == set()


def test_changelog_tells_of_this_version() -> None:
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()
