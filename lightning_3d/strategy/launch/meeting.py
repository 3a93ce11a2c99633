"""Where the ranks of a job meet that torchrun may start again: nothing of an earlier attempt is found there.

The agents of torchrun lend one store to all attempts of a job (torch.distributed.elastic's agent store). What the ranks
of an earlier attempt have left in it, such as their addresses, would be taken for that of the ranks now.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from lightning_3d.errors import MeshError

_PAUSE_SECONDS = 0.01
_ROUND, _HERE, _ALL = "round", "here", "all"


def lends_store() -> bool:
    """Whether an agent of torchrun has a store for the ranks that it has started."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(name: str, timeout: timedelta) -> tuple[Store, int, int]:
    """Returns a store for the ranks of this attempt alone, this rank, and how many ranks there are.

    Every rank calls it. The variables that torchrun sets must be there.

    Args:
        name: For what the ranks meet.
        timeout: How long a rank waits, here and in the store.

    Raises:
        MeshError: Not all ranks have come in time.
    """
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    if not lends_store():
        return PrefixStore(f"lightning_3d/{name}", store), rank, world
    place = PrefixStore(f"lightning_3d/{name}", store)
    return PrefixStore(f"of-{fresh_round(place, rank, world, timeout)}", place), rank, world


def fresh_round(store: Store, rank: int, world: int, timeout: timedelta) -> str:
    """Returns a name that the ranks that call this now agree on, whatever others have left in the store.

    The first rank proposes a new name; each rank says under every name that it finds that it is here, until it finds
    itself among those that the first rank has seen under that name.

    Args:
        store: What the ranks share, used for nothing else, now and by earlier calls.
        rank: This rank.
        world: How many ranks there are.
        timeout: How long to wait for the others.

    Raises:
        MeshError: Not all ranks have come in time.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    if rank == 0:
        store.set(_ROUND, uuid.uuid4().hex)
    missing = list(range(world))
    while time.monotonic() < end:
        name = store.get(_ROUND).decode()
        store.set(f"{name}/{_HERE}/{rank}", own)
        if rank == 0:
            missing = [other for other in range(world) if not store.check([f"{name}/{_HERE}/{other}"])]
            if not missing:
                here = [store.get(f"{name}/{_HERE}/{other}").decode() for other in range(world)]
                store.set(f"{name}/{_ALL}", json.dumps(here))
        if store.check([f"{name}/{_ALL}"]) and own in json.loads(store.get(f"{name}/{_ALL}")):
            return name
        time.sleep(_PAUSE_SECONDS)
    waited = f"ranks {', '.join(map(str, missing))} have" if rank == 0 else "rank 0 has"
    raise MeshError(
        f"{waited} not come to meet the others within {timeout.total_seconds():g} s.",
        fix="see why they have not started, or give more time: timeout_seconds",
    )
