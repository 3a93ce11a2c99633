"""What the ranks of a job tell each other when one of them ends before its time."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

import torch.distributed as dist

# How gloo's errors name their own files; NCCL's have a class.
_GLOO = "/gloo/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Why a job ends.

    Attributes:
        rank: The rank that was the first.
        text: Its traceback; empty if its process has ended without a word.
        is_cause: False where it has only waited for others in vain.
        positions: Where each rank was when it was last heard, by rank.
    """

    rank: int
    text: str = ""
    is_cause: bool = True
    positions: Mapping[int, str] = field(default_factory=dict)

    @property
    def headline(self) -> str:
        """What has happened, in one line."""
        where = self.positions.get(self.rank)
        at = f", last heard in {where}" if where else ""
        if not self.is_cause:
            return f"ranks have waited for each other in vain, rank {self.rank} was the first to give up{at}."
        if self.text:
            return f"rank {self.rank} has failed{at}."
        return f"rank {self.rank} has vanished{at}: its process was killed, or has ended without an error."

    def __str__(self) -> str:
        lines = [self.headline]
        others = {rank: where for rank, where in self.positions.items() if rank != self.rank}
        lines += [f"  {ranks}: {where or 'not heard yet'}" for where, ranks in grouped(others)]
        return "\n".join([*lines, *self.text.splitlines()])

    def packed(self) -> bytes:
        """Returns it as bytes that `unpacked` reads."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def unpacked(cls, content: bytes) -> Fault:
        """Reads what `packed` has made."""
        found: dict[str, Any] = json.loads(content)
        positions = {int(rank): where for rank, where in found.pop("positions").items()}
        return cls(**found, positions=positions)


def grouped(positions: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Yields each position with the ranks that are there, as "ranks 0-2, 5"."""
    for where in dict.fromkeys(positions.values()):
        ranks = sorted(rank for rank, other in positions.items() if other == where)
        yield where, f"rank{'s' * (len(ranks) > 1)} {_spans(ranks)}"


def is_consequence(error: BaseException) -> bool:
    """Whether an error is what a rank meets in a collective when others are gone, or do not come."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _GLOO in str(error))


def add_note(error: BaseException, text: str) -> None:
    """Adds a text to an error, which is printed below it."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        # Python 3.10 has no notes.
        sys.stderr.write(f"{text}\n")


def traceback_of(error: BaseException) -> str:
    """Returns an error as Python prints it."""
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _spans(ranks: Iterable[int]) -> str:
    spans = []
    for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0]):
        found = [rank for _, rank in run]
        spans.append(str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}")
    return ", ".join(spans)
