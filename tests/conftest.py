import os
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_cache() -> Iterator[None]:
    """Keeps what a run remembers for the next one, such as proofs, out of the user's cache."""
    with tempfile.TemporaryDirectory(prefix="cache-") as directory:
        before = os.environ.get("XDG_CACHE_HOME")
        os.environ["XDG_CACHE_HOME"] = directory
        yield
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(autouse=True)
def _own_seed() -> Iterator[None]:
    """Keeps what ``seed_everything`` leaves in the environment from other tests, and from their processes.

    Fixtures of whole modules leave it too, so each test begins without.
    """
    names = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")
    for name in names:
        os.environ.pop(name, None)
    yield
    for name in names:
        os.environ.pop(name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a CUDA device where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
