"""The hub, with connections of threads in the place of processes."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection
from typing import Any

import pytest

from lightning_3d.faults.hub import BYE, FAILED, HELLO, IS_CAUSE, POSITION, VERDICT, Hub
from lightning_3d.faults.report import Fault

KEY = b"of this job"
SECONDS = 5.0


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub(KEY, 3)
    made.start()
    yield made
    made.close()
    for thread in threading.enumerate():
        if thread.name.startswith("faults:"):
            thread.join(SECONDS)
            assert not thread.is_alive(), f"{thread.name} is left"


def join(hub: Hub, rank: int, position: str = "") -> Connection:
    connection: Any = Client(("127.0.0.1", hub.port), authkey=KEY)
    say(connection, {HELLO: rank})
    say(connection, {POSITION: position})
    return connection


def say(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())


def heard(connection: Connection) -> dict[str, Any]:
    assert connection.poll(SECONDS), "nothing is heard"
    found: dict[str, Any] = json.loads(connection.recv_bytes())
    return found


def verdict(connection: Connection) -> Fault:
    return Fault.unpacked(heard(connection)[VERDICT].encode())


def test_a_failure_is_told_to_all(hub: Hub) -> None:
    ranks = [join(hub, rank, f"batch {rank}") for rank in range(3)]
    say(ranks[1], {POSITION: "batch 9", FAILED: "boom", IS_CAUSE: True})
    for connection in ranks:
        found = verdict(connection)
        assert (found.rank, found.text, found.positions[1]) == (1, "boom", "batch 9")


def test_a_connection_that_breaks_is_a_rank_that_has_vanished(hub: Hub) -> None:
    ranks = [join(hub, rank, f"batch {rank}") for rank in range(3)]
    ranks[2].close()
    assert [(found.rank, found.text) for found in map(verdict, ranks[:2])] == [(2, ""), (2, "")]


def test_what_another_rank_has_caused_is_not_the_cause(hub: Hub) -> None:
    ranks = [join(hub, rank) for rank in range(3)]
    say(ranks[0], {FAILED: "connection closed by peer", IS_CAUSE: False})
    ranks[2].close()
    assert verdict(ranks[0]).rank == 2


def test_of_collectives_alone_the_first_that_failed_is_told(hub: Hub) -> None:
    ranks = [join(hub, rank, "batch 1") for rank in range(3)]
    say(ranks[1], {FAILED: "timed out", IS_CAUSE: False})
    # So that it is heard before the next one.
    time.sleep(0.5)
    say(ranks[0], {FAILED: "closed", IS_CAUSE: False})
    found = [verdict(connection) for connection in ranks]
    assert {(each.rank, each.text) for each in found} == {(1, "timed out")}
    assert set(found[0].positions) == {0, 1, 2}


def test_who_says_goodbye_has_not_vanished(hub: Hub) -> None:
    ranks = [join(hub, rank) for rank in range(3)]
    say(ranks[1], {BYE: True})
    ranks[1].close()
    assert not ranks[0].poll(0.5)


def test_a_rank_that_comes_late_hears_of_it(hub: Hub) -> None:
    first = join(hub, 0)
    say(first, {FAILED: "boom", IS_CAUSE: True})
    assert verdict(first).rank == 0
    assert verdict(join(hub, 1)).rank == 0


def test_strangers_are_not_heard(hub: Hub) -> None:
    with pytest.raises(Exception, match="digest"):
        Client(("127.0.0.1", hub.port), authkey=b"of another job")
    ranks = [join(hub, rank) for rank in range(3)]
    say(ranks[0], {FAILED: "boom", IS_CAUSE: True})
    assert verdict(ranks[2]).text == "boom"


def test_a_hub_that_ends_says_goodbye(hub: Hub) -> None:
    rank = join(hub, 1)
    hub.close()
    assert heard(rank) == {BYE: True}
