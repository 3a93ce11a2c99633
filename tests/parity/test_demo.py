"""The recipe that people try first gives on eight processes what it gives on one."""

import pytest

from tests.parity.demo import PAIRS, losses, table

_SHORT = ("data.max_bytes=300000",)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.spmd
@pytest.mark.timeout(600)
def test_the_losses_of_the_demo_are_those_of_plain_lightning() -> None:
    _, mesh, one = PAIRS[0]
    found, expected = (losses([*_SHORT, *overrides], steps=4, every=1) for overrides in (mesh, one))
    assert list(expected) == [1, 2, 3, 4]
    assert found == pytest.approx(expected, rel=1e-10)


def test_tables_say_whether_printed_digits_are_equal() -> None:
    lines = table("title", {10: 3.50001, 20: 2.0}, {10: 3.50004, 20: 2.0}).splitlines()
    assert lines[2] == "   10     3.5000       3.5000"
    assert lines[-1] == "equal in all printed digits; largest relative difference 8.6e-06"
    assert table("title", {10: 3.5}, {10: 3.6}).splitlines()[-1].startswith("not equal in all printed digits")
