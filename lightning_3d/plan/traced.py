"""What each part of any module costs, traced from its own step: parameters, operations, and what waits for backward.

The step runs forward without values, once for each kind of activation checkpointing, by the code that training uses.
Bytes are those of the storages that autograd saves (Korthikanti et al. 2022, "Reducing Activation Recomputation in
Large Transformer Models", section 4, count the same for one architecture), each counted once, where it is first saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.config.schema import KEPT_KINDS
from lightning_3d.graph.blocks import find_stacks
from lightning_3d.graph.calls import Call, handled
from lightning_3d.graph.parameters import ParameterTable, parameter_table
from lightning_3d.graph.stand_ins import without_values
from lightning_3d.parallel.pipeline.record.flops import CountsFlops
from lightning_3d.plan.recompute import is_kept, is_kept_product, recomputing

# Products of activations with each other.
_OF_ACTIVATIONS = ("bmm", "baddbmm", "scaled_dot_product")


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedPart:
    """A block, or what runs before the first or after the last one.

    Attributes:
        name: Name of the block in the module; "first" or "last" for the ends.
        parameters: Elements of the parameters that it uses; tied ones count in the first part that uses them.
        weight_flops: Floating point operations of a forward: products with weights, and convolutions.
        activation_flops: Of products of activations: attention, over the whole square of scores.
        again_flops: Of products with weights, what "selective" computes again: grouped products of experts.
        kept: Bytes that wait for backward after a forward, by kind of activation checkpointing.
        output: Bytes of what it returns.
    """

    name: str
    parameters: int
    weight_flops: float
    activation_flops: float
    again_flops: float
    kept: Mapping[str, int]
    output: int

    @property
    def flops(self) -> float:
        """Operations of a forward."""
        return self.weight_flops + self.activation_flops


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedModel:
    """A model as its own step shows it.

    Attributes:
        first: What runs before the blocks: embeddings.
        blocks: The blocks in the order of their calls.
        last: What runs after them: the final norm, the head, the loss.
        logits: Bytes of the largest tensor that is saved after the last block: the scores over a vocabulary.
    """

    first: TracedPart
    blocks: tuple[TracedPart, ...]
    last: TracedPart
    logits: int

    @property
    def parts(self) -> tuple[TracedPart, ...]:
        """All parts, in the order in which they run."""
        return (self.first, *self.blocks, self.last)

    def kept(self, kind: str = "none") -> int:
        """Returns the bytes of all parts that wait for backward."""
        return sum(part.kept[kind] for part in self.parts)


def trace_model(module: LightningModule, step: Callable[[], Any]) -> TracedModel:
    """Returns what each part of a module costs, for the batch that its step is given.

    Args:
        module: The whole module, real or on the meta device; it is left as it was.
        step: Calls the user's step with a real batch, in the autocast mode that it will have.
    """
    blocks = [block for stack in find_stacks(module) for block in stack.blocks]
    runs = {kind: _run(module, step, blocks, kind) for kind in KEPT_KINDS}
    plain = runs["none"]
    names = ["first", *plain.order, "last"]
    table = _parameters(parameter_table(module), plain.order)
    parts = [
        TracedPart(
            name=name,
            parameters=table[index],
            weight_flops=plain.weights[index],
            activation_flops=plain.activations[index],
            again_flops=plain.again[index],
            kept={kind: run.saved[index] for kind, run in runs.items()},
            output=plain.outputs[index],
        )
        for index, name in enumerate(names)
    ]
    return TracedModel(first=parts[0], blocks=tuple(parts[1:-1]), last=parts[-1], logits=plain.largest)


class _Run:
    """What one forward shows. Part 0 runs before the first block, part k from the call of block k on.

    Args:
        count: Number of blocks.
        ignored: Storages that are no activations.
    """

    def __init__(self, count: int, ignored: set[int]) -> None:
        self.order: list[str] = []
        self.saved = [0] * (count + 2)
        self.weights = [0.0] * (count + 2)
        self.activations = [0.0] * (count + 2)
        self.again = [0.0] * (count + 2)
        self.outputs = [0] * (count + 2)
        self.largest = 0
        self._count = count
        self._part = 0
        self._seen = ignored
        # So that no storage's place is given to another one.
        self._alive: list[Tensor] = []

    def begin(self, name: str) -> None:
        """A block is called."""
        self.order.append(name)
        self._part = len(self.order)

    def end(self, output: Any) -> None:
        """It has returned."""
        self.outputs[self._part] = _bytes(output)
        if len(self.order) == self._count:
            self._part = self._count + 1

    def save(self, tensor: Tensor) -> Tensor:
        """Autograd saves a tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._alive.append(tensor)
            self.saved[self._part] += storage.nbytes()
            if self._part > self._count:
                self.largest = max(self.largest, storage.nbytes())
        return tensor

    def add(self, count: float, operation: str) -> None:
        """Operations are computed."""
        activations = any(name in operation for name in _OF_ACTIVATIONS)
        (self.activations if activations else self.weights)[self._part] += count
        if not activations and not is_kept_product(operation):
            self.again[self._part] += count


class _Kept(TorchDispatchMode):
    """Hands what selective checkpointing keeps to a function; autograd does not save it.

    Args:
        save: Is told each result.
    """

    def __init__(self, save: Callable[[Tensor], Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._save = save
        self.inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes."""
        output = func(*args, **(kwargs or {}))
        if self.inside and is_kept(func):
            self._save(output)
        return output


def _run(module: LightningModule, step: Callable[[], Any], blocks: Sequence[str], kind: str) -> _Run:
    through = recomputing(kind)
    with without_values(module):
        run = _Run(len(blocks), {each.untyped_storage()._cdata for each in module.parameters()})
        kept = _Kept(run.save)

        def handler(name: str, call: Call) -> Any:
            run.begin(name)
            kept.inside = kind == "selective"
            output = call() if through is None else through(lambda a, k: call.function(*a, **k), call.args, call.kwargs)
            kept.inside = False
            run.end(output)
            return output

        saving = saved_tensors_hooks(run.save, lambda tensor: tensor)
        with _handled(module, blocks, handler), saving, kept, CountsFlops(run.add):
            step()
    return run


@contextmanager
def _handled(module: nn.Module, blocks: Sequence[str], handler: Callable[[str, Call], Any]) -> Iterator[None]:
    with ExitStack() as at_end:
        for name in blocks:
            at_end.enter_context(handled(module.get_submodule(name), partial(handler, name)))
        yield


def _parameters(table: ParameterTable, blocks: Sequence[str]) -> list[int]:
    """Elements of each part, by where a parameter's first name lies: before the blocks, in one of them, or after."""
    found = [0] * (len(blocks) + 2)
    at = {name: index + 1 for index, name in enumerate(blocks)}
    part = 0
    for row in table.rows:
        inside = next((at[block] for block in at if row.name.startswith(f"{block}.")), None)
        part = inside if inside is not None else part
        home = inside if inside is not None else (0 if part == 0 else len(blocks) + 1)
        found[home] += row.numel
    return found


def _bytes(value: Any) -> int:
    return sum(leaf.nbytes for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
