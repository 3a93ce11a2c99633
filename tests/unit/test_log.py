import logging
import threading
import time

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_only

from lightning_3d.log import get_logger, info_on_first_rank, process_rank, told_if_slow

_VARIABLES = ("RANK", "SLURM_PROCID", "LOCAL_RANK")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in _VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(rank_zero_only, "rank", 0)


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


def test_what_a_strategy_has_set_wins_over_what_nodes_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(rank_zero_only, "rank", 5)
    assert process_rank() == 5


def test_only_rank_0_speaks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    logger = get_logger("lightning_3d.test")
    with caplog.at_level(logging.INFO, logger.name):
        info_on_first_rank(logger, "from rank 0")
        monkeypatch.setenv("RANK", "1")
        info_on_first_rank(logger, "from rank 1")
    assert caplog.messages == ["from rank 0"]


def test_loggers_bring_no_handler() -> None:
    assert get_logger("lightning_3d.test").handlers == []


def test_what_is_quick_is_not_told() -> None:
    told: list[str] = []
    before = threading.active_count()
    with told_if_slow("reading", told.append):
        pass
    assert told == []
    assert threading.active_count() == before


def test_what_is_slow_is_told_while_it_lasts_and_at_its_end() -> None:
    told: list[str] = []
    with told_if_slow("reading", told.append, after=0.01):
        time.sleep(0.1)
        assert told == ["reading ..."]
    assert len(told) == 2
    assert told[1].startswith("reading took 0.")


def test_what_fails_has_no_end_to_tell() -> None:
    told: list[str] = []

    def read() -> None:
        with told_if_slow("reading", told.append, after=0.01):
            time.sleep(0.1)
            raise ValueError("no file")

    with pytest.raises(ValueError, match="no file"):
        read()
    assert told == ["reading ..."]
