from __future__ import annotations

import re

import pytest

from lightning_3d.cli import VERBS
from tests.documents.outputs import PAGES, Shown, part_of, shown

BLOCKS = [block for page in PAGES for block in shown(page)]
# Numbers of a run: errors, times and hashes differ from machine to machine, their rows and words do not.
_NUMBER = re.compile(r"[0-9a-f.+\-e%]*\d[0-9a-f.+\-e%]*|same bits")


def test_which_lines_are_shown() -> None:
    output = "\none\ntwo  \nthree\n\n"
    assert part_of(output, "") == "one\ntwo\nthree\n"
    assert part_of(output, "first 2 lines") == "one\ntwo\n"
    assert part_of(output, "last 1 lines") == "three\n"
    assert part_of(output, "from tw, 1 lines") == "two\n"


def test_the_readme_shows_a_plan_and_a_certificate() -> None:
    verbs = {block.command.split()[1] for block in BLOCKS if block.page.name == "README.md"}
    assert verbs == {"plan", "verify"}
    assert {block.command.split()[1] for block in BLOCKS} <= set(VERBS)


@pytest.mark.parametrize("block", [block for block in BLOCKS if " plan " in block.command], ids=lambda b: b.command)
def test_plans_are_what_the_command_prints(block: Shown) -> None:
    made, there = (re.sub(r"priced in [\d.]+ s", "", text) for text in (block.made(), block.body))
    assert made == there


@pytest.mark.thorough
@pytest.mark.parametrize("block", [block for block in BLOCKS if " plan " not in block.command], ids=lambda b: b.command)
def test_outputs_have_the_lines_that_the_command_prints(block: Shown) -> None:
    made, there = (re.sub(r" +", " ", _NUMBER.sub("#", text)) for text in (block.made(), block.body))
    assert made == there
