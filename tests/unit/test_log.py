import logging

import pytest

from lightning_3d.log import get_logger, info_once, process_rank

_VARIABLES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in _VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def test_rank_is_0_alone() -> None:
    assert process_rank() == 0


@pytest.mark.parametrize("variable", _VARIABLES)
def test_rank_comes_from_the_launcher(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "3")
    assert process_rank() == 3


def test_global_rank_wins_over_the_local_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "9")
    assert process_rank() == 9


def test_only_rank_0_speaks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("lightning_3d.test")
    with caplog.at_level(logging.INFO, logger.name):
        info_once(logger, "from rank 0")
        monkeypatch.setenv("RANK", "1")
        info_once(logger, "from rank 1")
    assert caplog.messages == ["from rank 0"]


def test_loggers_bring_no_handler() -> None:
    assert get_logger("lightning_3d.test").handlers == []
