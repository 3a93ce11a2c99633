"""Loaders in the place of others are those in all but their end."""

import copy

from torch.utils.data import DataLoader

from lightning_3d.strategy.data.ends import _ShortLoader


def test_a_loader_that_ends_early_is_copied_and_written_to_as_the_loader_itself() -> None:
    loader = DataLoader([1, 2, 3])
    short = copy.copy(_ShortLoader(loader, 2))
    short.prefetch_factor = 7
    assert (len(short), [int(batch) for batch in short]) == (2, [1, 2])
    assert loader.prefetch_factor == short.prefetch_factor == 7
