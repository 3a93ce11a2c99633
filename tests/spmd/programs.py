"""Runs programs of several processes in a user's directory, and sees that none of them outlives its command."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.sources import ROOT

_MARK = "LIGHTNING_3D_TEST_PROGRAM"
_OUTSIDE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PL_GLOBAL_SEED")
_SECONDS = 200
_GRACE = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """What is left of a program: its exit code and all that it printed."""

    code: int
    output: str


def run_python(directory: Path, *words: str) -> Finished:
    """Runs ``python WORDS`` in a directory.

    Raises:
        AssertionError: A process of the program is still there after its end.
    """
    mark = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name not in _OUTSIDE}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", _MARK: mark}
    with (directory / "output.txt").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=directory, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(_SECONDS)
        finally:
            left = _left(mark)
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        output.seek(0)
        text = output.read()
    assert left == [], f"processes are left behind: {left}\n{text}"
    return Finished(code=code, output=text)


def records(directory: Path) -> list[Any]:
    """Returns what the ranks of a job left in its directory, in their order."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob("rank*.json"))]


def _left(mark: str) -> list[int]:
    """Returns the processes that do not end by themselves shortly after the one that was started."""
    end = time.monotonic() + _GRACE
    while (found := _marked(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return found


def _marked(mark: str) -> list[int]:
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{_MARK}={mark}".encode() in environ.read_bytes():
                found.append(int(environ.parent.name))
        except OSError:  # it has ended meanwhile, or is somebody else's
            continue
    return found
