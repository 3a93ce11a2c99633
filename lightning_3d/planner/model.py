"""What a prediction has to know of a model: the price of its parts, one per block and one at each end.

A `DecoderShape` becomes such a model by formulas; any other module by tracing its own step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes for one sample, by what the tensor axis does to them.

    Attributes:
        whole: On every tensor rank; sequence parallelism cuts them.
        cut: Each tensor rank has its part.
        alone: On a single rank only: products that several tensor ranks sum, and compute again.
    """

    whole: float = 0.0
    cut: float = 0.0
    alone: float = 0.0

    def on_rank(self, tensor: int, sequence_parallel: bool) -> float:
        """Returns what one of some tensor ranks holds."""
        whole = self.whole / (tensor if sequence_parallel else 1)
        return whole + self.cut / tensor + (self.alone if tensor == 1 else 0.0)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter: the data axis pads its rows, the tensor axis cuts one of its dims, or none.

    Attributes:
        rows: Length of dim 0.
        columns: Elements of a row.
        cut_dim: 0, 1, or None for one that every tensor rank has.
        count: How many there are of it.
    """

    rows: int
    columns: int = 1
    cut_dim: int | None = None
    count: int = 1

    @property
    def elements(self) -> int:
        """Elements of all of them."""
        return self.rows * self.columns * self.count

    def on_rank(self, tensor: int, shards: int = 1) -> float:
        """Returns the elements on one of some tensor ranks, with dim 0 padded to a multiple of the shards."""
        rows: float = self.rows
        columns: float = self.columns
        if self.cut_dim == 0:
            rows = -(-rows // tensor)
        elif self.cut_dim == 1:
            columns = columns / tensor
        return -(-rows // shards) * shards * columns * self.count


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """A block, or what runs before or after the blocks; activations and operations are those of one sample.

    Attributes:
        parameters: Elements of its parameters.
        cut_parameters: How many of them the tensor axis divides.
        matrices: Its parameters one by one, for what padding costs; empty: no padding is counted.
        rows: Rows of its matrix products: the tokens of a sample.
        width: Columns of its matrix products: the hidden size.
        matmul_flops: Of the products with weights in a forward; 2 for each multiplication with an addition.
        attention_flops: Of the products of activations, over the whole square of scores.
        again_flops: Of the products with weights, those that selective checkpointing of the "products" computes again.
        causal: Half of that square is masked.
        head_size: Features of an attention head; 0 without attention.
        kept: Bytes in 16 bit that live from forward to backward, by kind of activation checkpointing; with attention
            that never writes its scores.
        scores: Bytes in 16 bit of attention that writes its scores: kept in addition with unfused attention.
        state: Bytes in 16 bit of the hidden state that it passes on.
        sums: All-reduces of the state in a forward on the tensor axis; a backward has as many.
        logits: Elements of the scores over the vocabulary.
    """

    parameters: int = 0
    cut_parameters: int = 0
    matrices: tuple[Matrix, ...] = ()
    rows: int = 1
    width: int = 1
    matmul_flops: float = 0.0
    attention_flops: float = 0.0
    again_flops: float = 0.0
    causal: bool = False
    head_size: int = 0
    kept: Mapping[str, Bytes] = field(default_factory=lambda: MappingProxyType({}))
    scores: float = 0.0
    state: float = 0.0
    sums: int = 0
    logits: float = 0.0

    def parameters_on_rank(self, tensor: int) -> float:
        """Returns the elements of its parameters on one of some tensor ranks."""
        return self.parameters - self.cut_parameters + self.cut_parameters / tensor

    def padding(self, tensor: int, shards: int) -> float:
        """Returns the elements that padding to a multiple of the shards adds on one of some tensor ranks."""
        return sum(one.on_rank(tensor, shards) - one.on_rank(tensor) for one in self.matrices)

    def padded_on_rank(self, tensor: int, shards: int) -> float:
        """Returns the elements of its parameters on one of some tensor ranks, padded for the shards."""
        return self.parameters_on_rank(tensor) + self.padding(tensor, shards)

    def keeps(self, kind: str) -> Bytes:
        """Returns what lives from forward to backward under a kind of activation checkpointing."""
        return self.kept.get(kind) or self.kept.get("none") or Bytes()

    @property
    def forward_flops(self) -> float:
        """Operations of a forward."""
        return self.matmul_flops + self.attention_flops

    @property
    def is_block(self) -> bool:
        """Whether it is one of the repeated parts: they keep something, and can compute it again."""
        return bool(self.kept) and not self.logits


class ModelGraph(Protocol):
    """A model as the planner reads it; whatever has these attributes can be priced.

    Attributes:
        blocks: In model order. Equal blocks are the same object, which makes a search fast.
        first: What runs before the blocks: embeddings.
        last: What runs after them: the final norm, the head, the loss.
        shared_parameters: Elements that are both in ``first`` and ``last``: tied embeddings.
        heads: Numbers that the tensor degree must divide to cut attention: heads, and heads of keys and values.
    """

    @property
    def blocks(self) -> Sequence[Part]:
        """The repeated parts."""
        ...

    @property
    def first(self) -> Part:
        """What runs before them."""
        ...

    @property
    def last(self) -> Part:
        """What runs after them."""
        ...

    @property
    def shared_parameters(self) -> int:
        """Elements of both ends."""
        ...

    @property
    def heads(self) -> tuple[int, ...]:
        """What the tensor degree must divide."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockModel:
    """A `ModelGraph` as plain data; the attributes are those of the protocol."""

    blocks: tuple[Part, ...]
    first: Part
    last: Part
    shared_parameters: int = 0
    heads: tuple[int, ...] = ()


def total_parameters(model: ModelGraph) -> int:
    """Returns the elements of all parameters, shared ones once."""
    parts = (model.first, *model.blocks, model.last)
    return sum(part.parameters for part in parts) - model.shared_parameters


def forward_flops(model: ModelGraph) -> float:
    """Returns the operations of a forward of one sample."""
    return sum(part.forward_flops for part in (model.first, *model.blocks, model.last))
