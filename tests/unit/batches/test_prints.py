"""What micro-batches print: in their order, and once what all of them say."""

from __future__ import annotations

import pytest

from lightning_3d.batches.prints import SaidLines, lines_of_batch, say


def test_lines_are_as_print_makes_them(capsys: pytest.CaptureFixture[str]) -> None:
    said = SaidLines()
    said.add("a", 1, sep="-")
    said.add("b", end="")
    said.add()
    say(print, said.lines)
    assert capsys.readouterr().out == "a-1\nb\n"


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([["a", "1"], ["a", "2"]], ("a", "1", "2")),
        ([["a"], ["a", "a"]], ("a", "a", "a")),
        ([["a"]], ("a",)),
        ([[], []], ()),
    ],
)
def test_what_all_say_is_said_once(parts: list[list[str]], expected: tuple[str, ...]) -> None:
    assert lines_of_batch(parts) == expected
