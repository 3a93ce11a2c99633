"""What the documents show of a command's output is written by running it: `python -m tests.documents.outputs`.

A comment stands before each such block: ``<!-- output of COMMAND -->``, or with ``; first N lines``, ``; last N lines``
or ``; from TEXT, N lines`` at its end.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
_BLOCK = re.compile(
    r"(?P<head><!-- output of (?P<command>[^;]*?)(?:; (?P<part>[^>]*?))? -->\n```text\n)(?P<body>.*?)(?=^```$)",
    re.MULTILINE | re.DOTALL,
)
_FIRST, _LAST = re.compile(r"first (\d+) lines"), re.compile(r"last (\d+) lines")
_FROM = re.compile(r"from (.+), (\d+) lines")


@dataclass(frozen=True)
class Shown:
    """A block of a page that shows what a command prints.

    Attributes:
        page: The page.
        command: The command.
        part: Which lines of its output; empty for all.
        body: What stands there.
    """

    page: Path
    command: str
    part: str
    body: str

    def made(self) -> str:
        """Runs the command and returns what should stand there.

        Raises:
            CalledProcessError: It failed.
        """
        words = shlex.split(self.command)
        assert words[0] == "lightning-3d", self.command
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "lightning_3d", *words[1:]]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=900
            )
            return part_of(done.stdout.replace(folder, "."), self.part)


def part_of(output: str, part: str) -> str:
    """Returns the lines of an output that a block shows, without spaces at their ends."""
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    if found := _FIRST.fullmatch(part):
        lines = lines[: int(found[1])]
    elif found := _LAST.fullmatch(part):
        lines = lines[-int(found[1]) :]
    elif found := _FROM.fullmatch(part):
        begin = next(index for index, line in enumerate(lines) if line.startswith(found[1]))
        lines = lines[begin : begin + int(found[2])]
    else:
        assert not part, part
    return "\n".join(lines).strip("\n") + "\n"


def shown(page: Path) -> Iterator[Shown]:
    """Yields the blocks of a page."""
    for found in _BLOCK.finditer(page.read_text()):
        yield Shown(page, found["command"], found["part"] or "", found["body"])


def main() -> int:
    """Runs the commands and writes what they print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="commands that contain this")
    options = parser.parse_args()
    for page in PAGES:
        text = page.read_text()
        for block in shown(page):
            if options.only in block.command:
                print(f"{page.relative_to(ROOT)}: {block.command}", flush=True)
                marker = f"<!-- output of {block.command}{'; ' * bool(block.part)}{block.part} -->\n```text\n"
                text = text.replace(f"{marker}{block.body}", f"{marker}{block.made()}")
        page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
