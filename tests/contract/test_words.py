"""The project speaks of itself alone, and leaves no notes for later."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.sources import ROOT

_PLACES = ("lightning_3d", "conf", "recipes", "tests", "docs", ".ci", "README.md", "CHANGELOG.md", "Makefile")
_FILES = (*_PLACES, "pyproject.toml", "constraints.txt", "mkdocs.yml")
_TEXTS = (".py", ".yaml", ".yml", ".md", ".toml", ".txt", "")

_FORBIDDEN = re.compile(
    r"\b(TODO|FIXME|XXX|HACK)\b"
    r"|\bhelpers?\b"
    r"|\bsessions?\b"
    r"|(?<![\w.])/(work|root)/"
    r"|\bpypi\b|pythonhosted|download\.pytorch|npmjs|deb\.debian",
    re.IGNORECASE,
)
# pytest's word for one run of it, so a word of the tests.
_ALLOWED_IN_TESTS = re.compile(r"\bsessions?\b", re.IGNORECASE)


def complaints(text: str, *, of_tests: bool = False) -> Iterator[str]:
    """Yields the forbidden words of a text with their lines."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in _FORBIDDEN.finditer(_ALLOWED_IN_TESTS.sub("", line) if of_tests else line):
            yield f"line {number}: {found.group()}"


# This file has to name the words; the map quotes files that are read themselves.
_NOT_READ = (Path(__file__), ROOT / "docs" / "map.md")


def _texts() -> list[Path]:
    listed = [path for name in _FILES for path in [ROOT / name, *(ROOT / name).rglob("*")]]
    return [path for path in listed if path.is_file() and path.suffix in _TEXTS and "__pycache__" not in path.parts]


@pytest.mark.parametrize("path", [path for path in _texts() if path not in _NOT_READ], ids=lambda path: path.name)
def test_words(path: Path) -> None:
    assert list(complaints(path.read_text(), of_tests=ROOT / "tests" in path.parents)) == []


@pytest.mark.parametrize(
    "text",
    ["# TODO: later", 'scope="session"', "a helper of", "in this session", "see /work/x.md", "cd /root/a", "from PyPI"],
)
def test_a_forbidden_word_is_seen(text: str) -> None:
    assert len(list(complaints(text))) == 1


@pytest.mark.parametrize("text", ['@pytest.fixture(scope="session")', "tests/work/x", "helpful", "todos"])
def test_a_sound_text_has_no_complaint(text: str) -> None:
    assert list(complaints(text, of_tests=True)) == []
