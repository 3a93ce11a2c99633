"""Attributes that a step of a pipelined module changes: after a batch every rank has those of the last stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils import _pytree as pytree

from lightning_3d.graph.attributes import Attributes, Change, Held
from lightning_3d.log import get_logger
from lightning_3d.parallel.pipeline.plan import PipelinePlan
from lightning_3d.parallel.pipeline.run.placeholder import Placeholder, resolve
from lightning_3d.parallel.tensor.doors import whole
from lightning_3d.strategy.logging.relay import Relay

_log = get_logger(__name__)


class StepAttributes:
    """Keeps the plain attributes of a module alike on all ranks of a pipeline.

    A step changes them once for each micro-batch where it comes to its end, on the last stage. What it does on the way
    there, on other stages, each of them sees in its own later micro-batches, and after the batch it is forgotten.

    Args:
        module: The user's module.
        plan: Its pipeline.
        rank: This rank's place on the pipeline axis.
        relay: Sends what the last stage has found.
    """

    def __init__(self, module: LightningModule, plan: PipelinePlan, rank: int, relay: Relay) -> None:
        self._attributes = Attributes(module, plan.blocks)
        self._relay = relay
        self._several = len(plan.stages_of(rank)) > 1
        self._before: Held | None = None
        # What the stages of this rank have made of them, lowest stage first, and how often each micro-batch has run.
        self._own: dict[int, Held] = {}
        self._runs: Counter[int] = Counter()
        self._left: set[str] = set()

    def begin(self) -> None:
        """Called before the micro-batches of a batch run."""
        self._before = self._attributes.now()
        self._own.clear()
        self._runs.clear()

    @contextmanager
    def stage(self, microbatch: int) -> Iterator[None]:
        """Context of a step on one stage; the stages of a rank run a micro-batch one after the other.

        Args:
            microbatch: Its number.
        """
        if not self._several:
            yield
            return
        stage = self._runs[microbatch]
        self._runs[microbatch] += 1
        # The run of the stage watches functions of torch.
        with torch._C.DisableTorchFunction():
            before = self._attributes.now(copies=True)
            if stage in self._own:
                self._own[stage].put_back()
        try:
            yield
        except BaseException:
            # It was left where the stage ends, and has not finished.
            with torch._C.DisableTorchFunction():
                if before.changed:
                    self._own[stage] = self._attributes.now(copies=True)
                    before.put_back()
            raise

    def changed(self) -> bytes:
        """Returns what a batch has changed, on the rank of the last stage; nothing if nothing was."""
        assert self._before is not None, "a batch was begun"
        found = tuple(change for change in map(_finished, self._before.changes()) if change is not None)
        if not found:
            return b""
        packed = self._relay.packed(found)
        if packed is None:
            found = tuple(change for change in found if self._can_be_sent(change))
            packed = self._relay.packed(found)
        return packed or b""

    def finish(self, changed: bytes) -> None:
        """Gives every rank the attributes of the last stage.

        Args:
            changed: What `changed` returned there.
        """
        before, self._before = self._before, None
        assert before is not None, "a batch was begun"
        self._own.clear()
        if self._relay.sends:
            return
        before.put_back()
        if changed:
            self._attributes.change(self._relay.unpacked(changed))

    def _can_be_sent(self, change: Change) -> bool:
        if self._relay.packed(change) is not None:
            return True
        if str(change) not in self._left:
            self._left.add(str(change))
            _log.debug("%s cannot be pickled: it stays what it was on ranks without the last stage", change)
        return False


def _finished(change: Change) -> Change | None:
    """Returns a change as other ranks can have it; None for a value that never came to the last stage."""
    content: Any = whole(resolve(change.content))
    if any(isinstance(leaf, Placeholder) for leaf in pytree.tree_leaves(content)):
        _log.debug("%s is known on an earlier stage only", change)
        return None
    return replace(change, content=content)
