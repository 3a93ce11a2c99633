from lightning_3d.cost import Footprint, Traffic, TrafficRow


def row(operation: str, axis: str, calls: int, payload: int) -> Traffic:
    return Traffic(rows=(TrafficRow(operation=operation, axis=axis, group_size=4, calls=calls, payload=payload),))


def test_footprints_add_by_kind() -> None:
    both = Footprint(parameters=1, gradients=10) + Footprint(parameters=2, optimizer=100)
    assert both == Footprint(parameters=3, gradients=10, optimizer=100)
    assert both.total == 113


def test_traffic_adds_by_operation_and_axis() -> None:
    added = sum((row("all_gather", "a", 1, 8), row("all_gather", "b", 1, 8), row("all_gather", "a", 2, 4)), Traffic())
    assert added == row("all_gather", "a", 3, 12) + row("all_gather", "b", 1, 8)
    assert len(added.rows) == 2


def test_wire_is_that_of_rings() -> None:
    sent = {name: row(name, "a", 1, 8).wire for name in ("all_gather", "reduce_scatter", "all_reduce", "send")}
    assert sent == {"all_gather": 6, "reduce_scatter": 6, "all_reduce": 12, "send": 8}


def test_both_print_as_tables() -> None:
    assert str(Footprint(gathered_gradients=2048)).splitlines()[3].split() == ["gathered", "gradients", "2.00", "KiB"]
    line = str(row("all_reduce", "data_parallel", 3, 2048)).splitlines()[1]
    assert " ".join(line.split()) == "all_reduce data_parallel 4 3 2.00 KiB 3.00 KiB"
