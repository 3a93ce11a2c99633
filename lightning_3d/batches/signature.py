"""What of a micro-batch decides which way a step takes: its structure, shapes and plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

from torch import Tensor

from lightning_3d.batches.split import is_samples

_DECIDES = (bool, int, str, type(None))


def signature(value: Any, size: int | None, *, of_sample: bool = False) -> Hashable:
    """Returns the same for values that a step can be expected to treat alike.

    Plain values in a list of samples count by their types only, so that texts of another batch are no news.

    Args:
        value: A micro-batch, or anything else that a step is given.
        size: Samples of the micro-batch; None if nobody knows, and any list may be one of samples.
        of_sample: The value belongs to a single sample.
    """
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, Mapping):
        return type(value), tuple((key, signature(item, size, of_sample=of_sample)) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        of_sample = of_sample or size is None or is_samples(value, size)
        return type(value), tuple(signature(item, size, of_sample=of_sample) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return type(value), signature(items, size, of_sample=of_sample)
    return value if isinstance(value, _DECIDES) and not of_sample else f"a {type(value).__qualname__}"
