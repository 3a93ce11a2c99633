"""One recording of a block: what it did in one call, and the program that does the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_3d.parallel.tensor.replay.bits import same_bits
from lightning_3d.parallel.tensor.replay.caches import Update, noted_updates
from lightning_3d.parallel.tensor.replay.changes import Changes, PlainGlobals
from lightning_3d.parallel.tensor.replay.guards import Guard, Signature, write_guard
from lightning_3d.parallel.tensor.replay.program import Bodies, Program, Read, read_leaves, write_program
from lightning_3d.parallel.tensor.replay.recorder import Recorder
from lightning_3d.parallel.tensor.replay.results import take_apart
from lightning_3d.parallel.tensor.replay.surroundings import Surroundings
from lightning_3d.parallel.tensor.replay.writer import Constants, Unwritable, Writer


class Recording:
    """Records one call of a block.

    Args:
        signature: Of its arguments.
        modules: The block and all that is in it.
        read: Returns the plain local leaf of a parameter.
        changes: What is written to the modules.

    Attributes:
        refusal: Why there is no program.
        attributes_written: Whether the block wrote attributes of its modules, which it will do at each call.
    """

    def __init__(self, signature: Signature, modules: Sequence[nn.Module], read: Read, changes: Changes) -> None:
        self.refusal: str | None = None
        self.attributes_written = False
        self._signature = signature
        self._changes = changes
        self._globals = PlainGlobals()
        self._leaves = [(f"p{index}", leaf) for index, leaf in enumerate(read_leaves(modules, read))]
        self._writer = Writer()
        for name, leaf in self._leaves:
            self._writer.name(leaf.tensor, name)
        for index, value in enumerate(signature.inputs):
            if self._writer.knows(value):
                self.refusal = "an argument is a tensor of its own"
            self._writer.name(value, f"x{index}")
        self._updates: list[Update] = []
        devices = {tensor.device.type for tensor in self._operands()}
        self._surroundings = Surroundings.now(tuple(sorted(devices)))
        self._recorder = Recorder(self._writer, self._surroundings)

    def make(self, block: Callable[[], Any]) -> Any:
        """Makes the call and returns its result."""
        operands = self._operands()
        versions = [operand._version for operand in operands]
        # Some kernels write running statistics behind autograd's back.
        buffers = [(leaf.tensor, leaf.tensor.clone()) for _, leaf in self._leaves if not leaf.parameter]
        written, flags = self._changes.count, self._changes.training
        drawn = _random_states()
        updates = noted_updates(self._signature.caches, self._recorder.refuse)
        with self._globals.listening(), updates as self._updates, self._recorder:
            result = block()
        self._recorder.finish()
        self._written_to = [
            *(operand for operand, version in zip(operands, versions, strict=True) if operand._version != version),
            *(buffer for buffer, before in buffers if not same_bits(buffer, before)),
        ]
        self.attributes_written = (self._changes.count, self._changes.training) != (written, flags)
        if self.attributes_written:
            self._recorder.refuse("it writes attributes of its modules")
        if _random_states() != drawn:
            self._recorder.refuse("it draws random numbers of Python or NumPy")
        self.refusal = self.refusal or self._recorder.refusal
        return result

    def program(self, result: Any, bodies: Bodies) -> Program | None:
        """Returns what replays the call, if it can be replayed; else notes why not.

        Args:
            result: Of the call.
            bodies: Those that are known.
        """
        if self.refusal is not None:
            return None
        constants = Constants()
        try:
            return write_program(
                self._writer,
                inputs=self._signature.inputs,
                leaves=self._leaves,
                results=take_apart(result, constants),
                constants=constants,
                changed=self._written_to,
                grad=self._surroundings.grad if self._recorder.switches_grad else None,
                form=(self._surroundings.grad, self._surroundings.autocast),
                bodies=bodies,
            )
        except Unwritable as reason:
            self.refusal = f"its result: {reason}"
            return None

    @property
    def length(self) -> int:
        """Number of calls of torch."""
        return len(self._writer.steps)

    def guard(self) -> Guard:
        """Returns the guard of the program; if the block cannot be replayed, of the calls for which that is known."""
        return write_guard(
            self._signature,
            changes=self._changes,
            surroundings=self._surroundings,
            global_values=self._globals.found,
            updates=self._updates,
        )

    def _operands(self) -> tuple[Tensor, ...]:
        return (*self._signature.tensors, *(leaf.tensor for _, leaf in self._leaves))


def _random_states() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), *rest
