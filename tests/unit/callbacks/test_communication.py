from __future__ import annotations

import pytest

from lightning_3d.callbacks import Communication, CommunicationReport
from lightning_3d.counters import CollectiveRow, CollectiveTable
from lightning_3d.errors import ConfigError


def _sent(calls: int, size: int) -> CollectiveTable:
    row = CollectiveRow(
        operation="all_reduce", axis="data_parallel", group_size=2, calls=calls, payload=size, wire=float(size)
    )
    return CollectiveTable(rows=(row,))


def test_a_report_is_of_one_step_and_names_the_rank_that_sends_most() -> None:
    report = CommunicationReport(steps=2, tables=(_sent(3, 2048), _sent(2, 8192)))
    assert report.values(0) == {
        "communication/data_parallel/all_reduce_calls": 1.5,
        "communication/data_parallel/all_reduce_bytes": 1024,
    }
    title, _, row, total = str(report).splitlines()
    assert title == (
        "communication in an optimizer step, the mean of 2, of rank 0; most sent: of the rank that sends most"
    )
    assert row.split() == ["all_reduce", "data_parallel", "2", "1.5", *(["1.00", "KiB"] * 2), "4.00", "KiB"]
    assert total.split() == ["in", "all", "1.00", "KiB", "4.00", "KiB"]


def test_what_is_received_counts_where_it_is_sent() -> None:
    rows = [
        CollectiveRow(operation=name, axis="pipeline_parallel", group_size=2, calls=1, payload=size, wire=float(size))
        for name, size in (("send", 1024), ("receive", 4096))
    ]
    report = CommunicationReport(steps=1, tables=(CollectiveTable(rows=tuple(rows)),))
    assert report.most_sent() == 1024
    assert report.most_sent("receive", "pipeline_parallel") == 0
    *_, received, total = str(report).splitlines()
    assert received.split() == ["receive", "pipeline_parallel", "2", "1", "4.00", "KiB"]
    assert total.split() == ["in", "all", "1.00", "KiB", "1.00", "KiB"]


def test_a_rank_that_sends_nothing_says_so() -> None:
    assert str(CommunicationReport(steps=1, tables=(CollectiveTable(rows=()),))) == (
        "communication in an optimizer step: rank 0 sends nothing"
    )


@pytest.mark.parametrize("options", [{"at_batch": -1}, {"steps": 0}])
def test_impossible_numbers_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="counts nothing"):
        Communication(**options)
