"""The hub: rank 0 hears from all ranks of a job, and tells each of them who was the first to fail.

Every rank, rank 0 too, holds a connection to it. The system closes the connections of a process that is killed, so
nobody has to beat in time, and a rank that only takes long is never taken for dead.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Listener, wait
from typing import Any

from lightning_3d.faults.report import Fault

# Keys of messages.
HELLO, POSITION, FAILED, IS_CAUSE, BYE = "rank", "position", "failed", "is_cause", "bye"
VERDICT = "verdict"

_SECONDS_BETWEEN_LOOKS = 0.1
# So long a rank that has only met the failure of another one waits for word of that.
_SECONDS_FOR_A_CAUSE = 1.5
_ERRORS = (EOFError, OSError, ValueError, KeyError)


class Hub:
    """Hears from the ranks of one run, in threads of its own.

    Attributes:
        port: Where it listens.

    Args:
        key: Known to the ranks of this job alone.
        world: Number of ranks.
    """

    def __init__(self, key: bytes, world: int) -> None:
        self._listener = Listener(("", 0), backlog=world, authkey=key)
        self.port = int(self._listener.address[1])
        self._world = world
        self._peers: dict[Connection, int | None] = {}
        self._met = threading.Lock()
        self._positions: dict[int, str] = dict.fromkeys(range(world), "")
        self._verdict: Fault | None = None
        self._suspect: tuple[Fault, float] | None = None
        self._closing = threading.Event()
        self._missing = world

    def start(self) -> None:
        """Begins to hear."""
        for work in (self._accept, self._serve):
            threading.Thread(target=work, name=f"faults:{work.__name__}", daemon=True).start()

    def close(self) -> None:
        """Says goodbye to whoever listens still, and ends."""
        self._closing.set()

    def _accept(self) -> None:
        while self._missing and not self._closing.is_set():
            try:
                peer: Any = self._listener.accept()
            except Exception:
                # Not one of ours.
                continue
            with self._met:
                self._peers[peer] = None
                self._missing -= 1
        self._listener.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            with self._met:
                peers, is_over = list(self._peers), not self._peers and not self._missing
            if is_over:
                break
            if not peers:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
                continue
            for peer in wait(peers, timeout=_SECONDS_BETWEEN_LOOKS):
                assert isinstance(peer, Connection)
                self._hear(peer)
            if self._suspect is not None and time.monotonic() > self._suspect[1]:
                self._decide(self._suspect[0])
        for peer in list(self._peers):
            self._tell(peer, {BYE: True})
            self._forget(peer)
        self._stop_accepting()

    def _stop_accepting(self) -> None:
        self._closing.set()
        # A thread that waits for a connection does not notice that its socket is closed.
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()

    def _hear(self, peer: Connection) -> None:
        rank = self._peers[peer]
        try:
            message = json.loads(peer.recv_bytes())
            if HELLO in message:
                rank = self._peers[peer] = int(message[HELLO])
                if self._verdict is not None:
                    self._tell(peer, {VERDICT: self._verdict.packed().decode()})
            if POSITION in message and rank is not None:
                self._positions[rank] = str(message[POSITION])
            if FAILED in message and rank is not None:
                self._failed(rank, str(message[FAILED]), is_cause=bool(message[IS_CAUSE]))
            if BYE in message:
                self._forget(peer)
        except _ERRORS:
            self._forget(peer)
            if rank is not None:
                self._lost(rank)

    def _failed(self, rank: int, text: str, *, is_cause: bool) -> None:
        fault = Fault(rank=rank, text=text, is_cause=is_cause, positions=dict(self._positions))
        if is_cause:
            self._decide(fault)
        elif self._suspect is None:
            self._suspect = fault, time.monotonic() + _SECONDS_FOR_A_CAUSE

    def _lost(self, rank: int) -> None:
        if self._suspect is None or self._suspect[0].rank != rank:
            self._decide(Fault(rank=rank, positions=dict(self._positions)))

    def _decide(self, fault: Fault) -> None:
        if self._verdict is not None:
            return
        self._verdict, self._suspect = fault, None
        for peer in list(self._peers):
            self._tell(peer, {VERDICT: fault.packed().decode()})

    def _tell(self, peer: Connection, message: dict[str, Any]) -> None:
        try:
            peer.send_bytes(json.dumps(message).encode())
        except (OSError, ValueError):
            # It will be heard that it is gone.
            return

    def _forget(self, peer: Connection) -> None:
        with self._met:
            self._peers.pop(peer, None)
        peer.close()
