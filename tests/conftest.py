import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a CUDA device where there is none."""
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
