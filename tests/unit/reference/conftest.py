from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_3d.reference import TextDataModule

DataFactory = Callable[..., TextDataModule]


@pytest.fixture(scope="module")
def make_data(tmp_path_factory: pytest.TempPathFactory) -> DataFactory:
    """Builds data modules on one small text: 53 windows, of which 43 are for training, hence 6 batches an epoch."""
    folder = tmp_path_factory.mktemp("text")
    text = folder / "corpus.txt"
    text.write_text("".join(f"line {n:03d} of text\n" for n in range(200)))

    def make(**options: Any) -> TextDataModule:
        defaults = {
            "files": [str(text)],
            "length": 63,
            "batch_size": 8,
            "val_fraction": 0.08,
            "test_fraction": 0.08,
            "cache_dir": str(folder / "cache"),
        }
        return TextDataModule(**{**defaults, **options})

    return make
