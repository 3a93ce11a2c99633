"""One rank's process: takes calls from the pool, gives each a clean state and its own process group."""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import gc
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.distributed.tensor import debug as tensor_debug

_PR_SET_PDEATHSIG = 1
_MANY_MODULES = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """What every rank of one call is told.

    Args:
        payload: Pickled (function, args, kwargs); opened in the worker so that import errors have a traceback there.
        world: Number of ranks.
        port: Port of the store that the pool holds for this call.
        timeout: Seconds after which the pool kills the call.
        process_group: Whether the default process group exists when the function starts.
        environment: The caller's environment.
        directory: The caller's working directory.
        path: The caller's ``sys.path``.
        filters: The caller's warning filters.
    """

    payload: bytes
    world: int
    port: int
    timeout: float
    process_group: bool
    environment: dict[str, str]
    directory: str
    path: list[str]
    filters: list[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """How a call ended on one rank.

    Args:
        ended: When, on the clock that all processes of this host share.
        result: The function's result, pickled.
        traceback: Why there is no result.
    """

    ended: float
    result: bytes = b""
    traceback: str | None = None


def serve(rank: int, connection: Connection, stacks: str) -> None:
    """Answers calls until the pool closes the connection.

    Args:
        rank: Rank in every call.
        connection: Receives pickled `Call`s and sends pickled `Reply`s.
        stacks: File that gets this process' stack upon SIGUSR1.
    """
    _die_with_parent()
    # Workers of loaders start as in a user's program; from a fork server they would import everything anew.
    multiprocessing.set_start_method("fork", force=True)
    # Its own process group: Ctrl-C is the pool's business, and a kill reaches what the call has started.
    os.setpgid(0, 0)
    looked_through = 0
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False)
        while True:
            # Modules stay for good, and looking through them again takes longer than most calls. Only when there are
            # many new ones: what a call leaves, as threads of process groups, may go later.
            if len(sys.modules) > looked_through + _MANY_MODULES:
                gc.freeze()
                looked_through = len(sys.modules)
            try:
                call: Call = pickle.loads(connection.recv_bytes())
            except EOFError:
                return
            connection.send_bytes(pickle.dumps(_answer(rank, call)))


def _answer(rank: int, call: Call) -> Reply:
    try:
        with warnings.catch_warnings():
            _fresh_state(rank, call)
            function, args, kwargs = pickle.loads(call.payload)
            result = pickle.dumps(_run(function, rank, call, args, kwargs))
        return Reply(ended=time.monotonic(), result=result)
    except BaseException:  # SystemExit of a rank is a finding too
        return Reply(ended=time.monotonic(), traceback=traceback.format_exc())
    finally:
        # Peers that wait for this rank notice the closed group at once.
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()


def _run(function: Callable[..., Any], rank: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if call.process_group:
        # Longer than the call's own limit, so that a hang is reported with stacks instead of gloo's timeout.
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2 * call.timeout))
        # A function that ends at once would close its connections while slower ranks still make theirs.
        dist.barrier()
    return function(rank, call.world, *args, **kwargs)


def _fresh_state(rank: int, call: Call) -> None:
    """Undoes what earlier calls may have left in this process."""
    os.environ.clear()
    os.environ.update(call.environment)
    os.environ.update(_rank_environment(rank, call))
    os.chdir(call.directory)
    sys.path[:] = call.path
    warnings.filters[:] = call.filters  # type: ignore[index]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_float32_matmul_precision("highest")
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    # Meshes of two calls may be equal while the names of their groups differ.
    tensor_debug._clear_sharding_prop_cache()
    rank_zero_only.rank = rank


def _rank_environment(rank: int, call: Call) -> dict[str, str]:
    """What a launcher sets; the store is the pool's, as an elastic agent's is, so no port is ever taken."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(call.world),
        "LOCAL_WORLD_SIZE": str(call.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(call.port),
        "TORCHELASTIC_RUN_ID": "pool",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
