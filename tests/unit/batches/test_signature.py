from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lightning_3d.batches.signature import signature


@dataclass
class Pair:
    ids: torch.Tensor
    task: str


def batch(length: int = 5, task: str = "mlm", text: str = "one", number: float = 0.5) -> dict[str, Any]:
    ids = torch.zeros(2, length, dtype=torch.long)
    return {"ids": ids, "pair": Pair(ids, task), "texts": [text, "b"], "flag": None, "number": number}


@pytest.mark.parametrize("other", [batch(text="another"), batch(number=0.1), batch()])
def test_what_makes_no_difference(other: dict[str, Any]) -> None:
    assert signature(other, 2) == signature(batch(), 2)
    assert hash(signature(other, 2)) == hash(signature(batch(), 2))


@pytest.mark.parametrize("other", [batch(length=6), batch(task="nsp"), batch() | {"more": 1}, list(batch().items())])
def test_what_makes_one(other: Any) -> None:
    assert signature(other, 2) != signature(batch(), 2)


def test_samples_of_their_own_shapes() -> None:
    images = [torch.zeros(3, 4), torch.zeros(3, 5)]
    assert signature([{"image": image, "id": 3} for image in images], 2) == signature(
        [{"image": image, "id": 4} for image in images], 2
    )
    assert signature(images, 2) != signature(images[::-1], 2)


def test_a_batch_of_unknown_size_may_be_of_samples() -> None:
    assert signature(["a", "b", "c"], None) == signature(["d", "e", "f"], None)
    assert signature(["a", "b", "c"], 2) != signature(["d", "e", "f"], 2)
