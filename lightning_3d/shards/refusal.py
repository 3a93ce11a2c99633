"""Why an operation cannot be done on shards as they are cut."""

from __future__ import annotations

from collections.abc import Sequence


class Unshardable(Exception):  # noqa: N818 (no error: the caller does something else)
    """An operation has no exact form on these shards. The executor gathers, the planner plans anew.

    Args:
        reason: What stands in the way, in words that a plan can print.
    """


class NeedsSegments(Unshardable):
    """The operation would be exact if the sharded dim were cut in these segments.

    Args:
        segments: Global lengths, of the dim as the operation sees it; of a parameter that it came from, in proportion.
        reason: The operation.
    """

    def __init__(self, segments: Sequence[int], reason: str) -> None:
        super().__init__(f"{reason} needs the segments {'|'.join(map(str, segments))}")
        self.segments = tuple(segments)
