from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract import tails
from tests.contract.sources import ROOT, python_files

LIBRARY = python_files("lightning_3d")
TESTS = python_files("tests")


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", LIBRARY, ids=_name)
def test_library_keeps_every_rule(path: Path) -> None:
    text = path.read_text()
    assert [complaint for rule in tails.RULES for complaint in rule(text)] == []


@pytest.mark.parametrize("path", TESTS, ids=_name)
def test_tests_are_short_and_annotated(path: Path) -> None:
    text = path.read_text()
    assert [*tails.too_long(text), *tails.global_statements(text), *tails.not_annotated(text)] == []


@pytest.mark.parametrize("folder", ["conf", "recipes"])
def test_lines_of_the_configuration_are_short(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.yaml"))
    assert [_name(path) for path in files for line in path.read_text().splitlines() if len(line) > 120] == []
    assert files


_LONG_FUNCTION = "def f() -> None:\n" + "    x = 1\n" * 60
_LONG_CLASS = "class C:\n" + "    x = 1\n" * 350


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (tails.too_long, _LONG_FUNCTION),
        (tails.too_long, _LONG_CLASS),
        (tails.too_long, "x = 1\n" * 401),
        (tails.global_statements, "def f() -> None:\n    global x\n    x = 1\n"),
        (tails.not_annotated, "def f(x) -> None: ..."),
        (tails.not_annotated, "def f(*, x) -> None: ..."),
        (tails.not_annotated, "def f(*x) -> None: ..."),
        (tails.not_annotated, "def f(x: int): ..."),
        (tails.not_annotated, "class C:\n    def f(self): ..."),
        (tails.mutable_state, "x = []"),
        (tails.mutable_state, "x: dict[str, int] = {}"),
        (tails.mutable_state, "x: Final = {}"),
        (tails.mutable_state, "x = collections.defaultdict(int)"),
        (tails.mutable_state, "class C:\n    x = set()"),
    ],
)
def test_a_broken_rule_is_seen(rule: Callable[[str], Iterator[str]], text: str) -> None:
    assert len(list(rule(text))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "__all__ = ['f']",
        "X = (1, 2)",
        "X = frozenset({1})",
        "X: Final = MappingProxyType({'a': 1})",
        "X: Final[Mapping[str, int]] = {'a': 1}",
        "class C:\n    x: Sequence[int] = [1]",
        "class C:\n    def f(self, x: int) -> list[int]:\n        y = []\n        return y",
        _LONG_FUNCTION.replace("    x = 1\n", "", 1),
    ],
)
def test_sound_code_has_no_complaint(text: str) -> None:
    assert [complaint for rule in tails.RULES for complaint in rule(text)] == []
