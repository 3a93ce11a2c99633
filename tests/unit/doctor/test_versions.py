import pytest

from lightning_3d.doctor.findings import Level
from lightning_3d.doctor.versions import PYTHON, Requirement, check_versions

_NEEDED = Requirement(name="torch", minimum="2.11", tested="2.13.0")


@pytest.mark.parametrize(
    ("version", "level", "what"),
    [
        ("2.13.0+cpu", Level.OK, "torch 2.13.0+cpu"),
        ("2.11.0", Level.OK, "torch 2.11.0 (tested with 2.13.0)"),
        ("2.10.1", Level.PROBLEM, "torch 2.10.1 is older than 2.11"),
        ("2.14.1", Level.NOTE, "torch 2.14.1 is newer than the tested 2.13.0"),
        (None, Level.PROBLEM, "torch is not installed"),
    ],
)
def test_version_is_compared(version: str | None, level: Level, what: str) -> None:
    (finding,) = check_versions({"torch": version}, [_NEEDED])
    assert (finding.level, finding.what) == (level, what)
    assert bool(finding.fix) == (level is Level.PROBLEM)


def test_missing_extra_is_a_note_that_names_it() -> None:
    needed = Requirement(name="matplotlib", minimum="3.8", tested="3.11.2", extra="plot")
    (finding,) = check_versions({}, [needed])
    assert (finding.level, finding.fix) == (Level.NOTE, "pip install 'lightning-3d[plot]'")


@pytest.mark.parametrize(("version", "level"), [("3.9.2", Level.PROBLEM), ("3.11.7", Level.OK), ("3.13.0", Level.NOTE)])
def test_python_is_compared_by_its_minor_version(version: str, level: Level) -> None:
    (finding,) = check_versions({"python": version}, [PYTHON])
    assert finding.level is level
    assert "pip install" not in finding.fix
