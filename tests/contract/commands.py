"""The commands and the Python that the documents tell people to type."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

_FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PROGRAM = "lightning-3d"


def blocks(text: str, language: str) -> list[str]:
    """Returns the fenced blocks of a language."""
    return [body for name, body in _FENCE.findall(text) if name == language]


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yields the words of each command in the ``bash`` blocks of a document, comments dropped."""
    for block in blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def program_arguments(words: list[str]) -> list[str] | None:
    """Returns what a command hands to lightning-3d, started directly or by ``-m``; None for other commands."""
    if words[0] == _PROGRAM:
        return words[1:]
    if "lightning_3d" in words and words[words.index("lightning_3d") - 1] == "-m":
        return words[words.index("lightning_3d") + 1 :]
    return None


def make_targets(makefile: Path) -> set[str]:
    """Returns the targets that ``make help`` lists."""
    return set(re.findall(r"^([a-z-]+):.*## ", makefile.read_text(), re.MULTILINE))
