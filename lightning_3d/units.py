"""Numbers as people read them: bytes, counts and seconds as text."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "B", "T")
_METRIC = ("", "k", "M", "G", "T", "P", "E")


def format_bytes(count: float) -> str:
    """Returns ``count`` bytes with a binary prefix, e.g. ``1.50 GiB``."""
    value, unit = float(count), 0
    while abs(value) >= 1024 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_BINARY[0]}" if unit == 0 else f"{value:.2f} {_BINARY[unit]}"


def format_gb(count: float, digits: int = 1) -> str:
    """Returns bytes with a decimal prefix, as memories of devices are told: ``87.5 GB``, or ``3.2 MB`` for few."""
    return f"{count / 1e9:.{digits}f} GB" if count >= 5e7 else f"{count / 1e6:.{digits}f} MB"


def format_count(count: float) -> str:
    """Returns a count with a decimal prefix as models are named, e.g. ``124.4M``."""
    value, unit = float(count), 0
    while abs(value) >= 1000 and unit < len(_DECIMAL) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f}" if unit == 0 else f"{value:.1f}{_DECIMAL[unit]}"


def format_flops(per_second: float) -> str:
    """Returns operations per second with a metric prefix, e.g. ``312.0 TFLOP/s``."""
    value, unit = float(per_second), 0
    while abs(value) >= 1000 and unit < len(_METRIC) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.1f} {_METRIC[unit]}FLOP/s"


def counted(count: int, noun: str) -> str:
    """Returns a number of things, e.g. ``1 node``, ``2 nodes``, ``3 batches``."""
    plural = f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"
    return f"{count} {noun if count == 1 else plural}"


def format_seconds(seconds: float) -> str:
    """Returns a duration, e.g. ``12.3 ms``, ``4.2 s``, ``2 h 05 min``."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
