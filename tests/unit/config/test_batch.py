import pytest

from lightning_3d.config.batch import local_batch_size, num_microbatches
from lightning_3d.errors import BatchError


def test_equal_shares() -> None:
    assert [local_batch_size(24, degree) for degree in (1, 2, 3, 8, 24)] == [24, 12, 8, 3, 1]


@pytest.mark.parametrize(
    ("size", "degree", "text"),
    [
        (10, 4, "batch.global_size 8 or 12, or a data degree of 1 or 2 or 5"),
        (3, 4, "batch.global_size 4, or a data degree of 1 or 3"),
        (0, 1, "holds no sample"),
    ],
)
def test_unequal_shares_name_what_would_fit(size: int, degree: int, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        local_batch_size(size, degree)


@pytest.mark.parametrize(
    ("local", "micro", "requested", "pipeline", "expected"),
    [
        (8, None, "auto", 1, 1),
        (8, 2, "auto", 1, 4),
        (7, 2, "auto", 1, 4),
        (8, 16, "auto", 4, 1),
        (64, None, "auto", 4, 16),
        (6, None, "auto", 4, 6),
        (7, None, 4, 1, 4),
        (7, 2, 4, 1, 4),
    ],
)
def test_micro_batches(local: int, micro: int | None, requested: int | str, pipeline: int, expected: int) -> None:
    found = num_microbatches(local, micro_batch_size=micro, requested=requested, pipeline=pipeline)
    assert found == expected


@pytest.mark.parametrize(
    ("local", "micro", "requested", "text"),
    [
        (8, 2, 3, "num_microbatches=3 and micro_batch_size=2 disagree"),
        (3, None, 4, "more than the 3 samples"),
        (0, None, "auto", "without samples"),
    ],
)
def test_impossible_micro_batches(local: int, micro: int | None, requested: int | str, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        num_microbatches(local, micro_batch_size=micro, requested=requested, pipeline=1)
