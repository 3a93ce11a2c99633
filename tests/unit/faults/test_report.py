"""What is said of a rank that fails."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lightning_3d.faults.report import Fault, grouped, is_consequence


def test_ranks_at_the_same_place_stand_together() -> None:
    positions = {0: "a", 1: "a", 2: "b", 3: "a", 4: "b", 7: "a"}
    assert list(grouped(positions)) == [("a", "ranks 0-1, 3, 7"), ("b", "ranks 2, 4")]


def test_a_vanished_rank_is_named_with_its_place_and_that_of_the_others() -> None:
    text = str(Fault(rank=2, positions={0: "batch 4", 1: "batch 4", 2: "batch 3", 3: ""}))
    assert text.splitlines() == [
        "rank 2 has vanished, last heard in batch 3: its process was killed, or has ended without an error.",
        "  ranks 0-1: batch 4",
        "  rank 3: not heard yet",
    ]


def test_a_failed_rank_comes_with_its_traceback() -> None:
    text = str(Fault(rank=1, text="Traceback\nValueError: boom\n", positions={1: "setup"}))
    assert text.splitlines() == ["rank 1 has failed, last heard in setup.", "Traceback", "ValueError: boom"]


def test_a_wait_in_vain_is_nobodys_failure() -> None:
    fault = Fault(rank=1, text="Timed out", is_cause=False, positions={0: "a", 1: "b"})
    assert fault.headline == (
        "ranks have waited for each other in vain, rank 1 was the first to give up, last heard in b."
    )


def test_a_fault_travels_as_bytes() -> None:
    fault = Fault(rank=1, text="é\n", positions={0: "x", 11: "y"})
    assert Fault.unpacked(fault.packed()) == fault


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (dist.DistNetworkError("Connection reset"), True),
        (dist.DistBackendError("NCCL error"), True),
        (RuntimeError("shapes do not match"), False),
        (ValueError("/gloo/"), False),
    ],
    ids=["gloo", "store", "nccl", "other", "kind"],
)
def test_what_others_have_caused_is_told_apart(error: BaseException, expected: bool) -> None:
    assert is_consequence(error) is expected
