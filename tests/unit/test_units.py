import pytest

from lightning_3d.units import counted, format_bytes, format_count, format_flops, format_gb, format_seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1.5 * 2**30, "1.50 GiB"), (2**60, "1024.00 PiB")],
)
def test_bytes(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1.0k"), (124.4e6, "124.4M"), (70e9, "70.0B"), (3e12, "3.0T")]
)
def test_counts(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("flops", "text"),
    [(0, "0.0 FLOP/s"), (258400, "258.4 kFLOP/s"), (1.25e9, "1.2 GFLOP/s"), (312e12, "312.0 TFLOP/s")],
)
def test_operations_per_second(flops: float, text: str) -> None:
    assert format_flops(flops) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12.3 ms"), (4.2, "4.2 s"), (119.9, "119.9 s"), (120, "2 min"), (7500, "2 h 05 min")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes")])
def test_numbers_of_things(count: int, text: str) -> None:
    assert counted(count, "node") == text


@pytest.mark.parametrize(("noun", "text"), [("batch", "2 batches"), ("process", "2 processes"), ("GPU", "2 GPUs")])
def test_plurals_that_are_spoken_with_a_vowel(noun: str, text: str) -> None:
    assert counted(2, noun) == text
    assert counted(1, noun) == f"1 {noun}"


@pytest.mark.parametrize(("count", "text"), [(87.5e9, "87.5 GB"), (0.3e9, "0.3 GB"), (3.21e6, "3.2 MB"), (0, "0.0 MB")])
def test_bytes_as_memories_are_told(count: float, text: str) -> None:
    assert format_gb(count) == text
