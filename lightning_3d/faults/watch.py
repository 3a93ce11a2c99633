"""What every rank has of the watch over a job: it tells the hub how it ends, and ends when another rank has failed."""

from __future__ import annotations

import json
import os
import secrets
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Client, Connection
from typing import Any

import torch.distributed as dist

from lightning_3d.faults.agent import tell_agent_of
from lightning_3d.faults.hub import BYE, FAILED, HELLO, IS_CAUSE, POSITION, VERDICT, Hub
from lightning_3d.faults.report import Fault, is_consequence, traceback_of
from lightning_3d.log import get_logger

_SECONDS_BETWEEN_LOOKS = 0.1
# So long a rank may take to end by itself, as one does that a broken collective throws out.
_SECONDS_TO_END = 2.5
# So long a rank that fails waits to hear which one was the first.
_SECONDS_FOR_WORD = 2.0
_EXIT_STATUS = 1

_log = get_logger(__name__)


class FaultWatch:
    """Ends this process if another rank of the job fails or vanishes. Made by all ranks; a collective call.

    Args:
        group: All ranks.
        host: Where rank 0 is found.
        position: Says where this rank is; called from another thread.
    """

    def __init__(self, group: dist.ProcessGroup, host: str, position: Callable[[], str]) -> None:
        self._rank = group.rank()
        self._position = position
        self._hub: Hub | None = None
        address: list[Any] = [None]
        if self._rank == 0:
            address = [self._opened(group.size())]
        dist.broadcast_object_list(address, group=group, group_src=0)
        self._connection: Connection | None = None
        self._fault: Fault | None = None
        self._heard = threading.Event()
        # Set when this rank ends by itself: it has failed, or it is done.
        self._failed, self._done = threading.Event(), threading.Event()
        self._sending = threading.Lock()
        if address[0] is not None:
            port, key = address[0]
            where = "127.0.0.1" if self._rank == 0 else host
            threading.Thread(target=self._run, args=(where, port, key), name="faults:watch", daemon=True).start()

    def failed(self, error: BaseException) -> None:
        """Tells the others that this rank fails, once."""
        if self._failed.is_set():
            return
        self._failed.set()
        text, is_cause = traceback_of(error), not is_consequence(error)
        self._send({POSITION: self._where(), FAILED: text, IS_CAUSE: is_cause})

    def first(self) -> Fault | None:
        """Returns what has begun the end of the job, after `failed`; None if that cannot be found out."""
        if self._connection is not None:
            self._heard.wait(_SECONDS_FOR_WORD)
        return self._fault

    def close(self) -> None:
        """Ends the watch: this rank has done its work. After a failure it stays until the process ends."""
        if self._failed.is_set():
            return
        self._done.set()
        self._send({BYE: True})
        if self._hub is not None:
            self._hub.close()

    def _opened(self, world: int) -> tuple[int, bytes] | None:
        key = secrets.token_bytes(32)
        try:
            self._hub = Hub(key, world)
        except OSError as error:
            _log.warning("ranks that fail or vanish are noticed by collectives alone: no port to listen on (%s)", error)
            return None
        self._hub.start()
        return self._hub.port, key

    def _run(self, host: str, port: int, key: bytes) -> None:
        try:
            connection: Any = Client((host, port), authkey=key)
        except Exception as error:
            if not self._done.is_set():
                _log.warning("rank %d cannot reach the watch of rank 0 at %s:%d (%s)", self._rank, host, port, error)
            return
        self._connection = connection
        self._send({HELLO: self._rank})
        said = ""
        while not self._done.is_set():
            where = self._where()
            if where != said:
                self._send({POSITION: where})
                said = where
            if self._listen(connection):
                break
        with self._sending:
            self._connection = None
        connection.close()

    def _listen(self, connection: Connection) -> bool:
        """Hears what the hub says; returns whether that was the last of it."""
        try:
            if not connection.poll(_SECONDS_BETWEEN_LOOKS):
                return False
            message = json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            # The hub says goodbye unless its process is gone.
            fault = Fault(rank=0, positions={self._rank: self._where()})
        else:
            if VERDICT not in message:
                return BYE in message
            fault = Fault.unpacked(message[VERDICT].encode())
        self._fault = fault
        self._heard.set()
        threading.Thread(target=self._end, name="faults:end", daemon=True).start()
        return True

    def _end(self) -> None:
        """Ends the process if it does not end by itself."""
        if self._failed.wait(_SECONDS_TO_END) or self._done.is_set():
            return
        sys.stderr.write(f"rank {self._rank} ends here, in {self._where()}: {self._fault}\n")
        sys.stderr.flush()
        sys.stdout.flush()
        if self._fault is not None:
            tell_agent_of(self._fault)
        # Nothing milder ends a thread that waits in a collective.
        os._exit(_EXIT_STATUS)

    def _where(self) -> str:
        try:
            return self._position()
        except Exception:
            # Read beside a thread that may be changing it.
            return ""

    def _send(self, message: dict[str, Any]) -> None:
        with self._sending:
            if self._connection is None:
                return
            try:
                self._connection.send_bytes(json.dumps(message).encode())
            except (OSError, ValueError):
                # What is closed here the other thread notices.
                return
