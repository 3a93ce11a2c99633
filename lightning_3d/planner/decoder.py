"""From the shape of a decoder to the price of its parts.

Parameters and operations: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM", equations 2 and 3. Kept activations of GPT's form: Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", equations 1 to 6 and table 2. Of Llama's form: counted in the same way.
"""

from __future__ import annotations

from functools import lru_cache
from types import MappingProxyType

from lightning_3d.config.schema import KEPT_KINDS
from lightning_3d.planner.model import BlockModel, Bytes, Matrix, Part
from lightning_3d.planner.shapes import DecoderShape
from lightning_3d.planner.software import THIS_LIBRARY, Software

# An RMSNorm that is not one operation keeps its input and the normalised one, both in 32 bit: four states in 16 bit.
_COPIES_OF_NORM = 4


@lru_cache(maxsize=64)
def decoder_model(shape: DecoderShape, software: Software = THIS_LIBRARY) -> BlockModel:
    """Returns the price of a decoder's parts, as some software keeps activations."""
    block = _block(shape, software)
    first, last = _first(shape), _last(shape)
    return BlockModel(
        blocks=(block,) * shape.layers,
        first=first,
        last=last,
        shared_parameters=shape.vocab * shape.hidden if shape.is_tied else 0,
        heads=(shape.heads, shape.kv_heads),
    )


def _block(shape: DecoderShape, software: Software) -> Part:
    hidden, sequence = shape.hidden, shape.sequence
    matrices = _matrices(shape)
    weights = sum(one.elements for one in matrices if one.columns > 1)
    return Part(
        parameters=sum(one.elements for one in matrices),
        cut_parameters=sum(one.elements for one in matrices if one.cut_dim is not None),
        matrices=matrices,
        rows=sequence,
        width=hidden,
        matmul_flops=2.0 * sequence * weights,
        attention_flops=4.0 * sequence * sequence * hidden,
        causal=True,
        head_size=hidden // shape.heads,
        kept=MappingProxyType(_kept(shape, software)),
        scores=5.0 * shape.heads * sequence * sequence,
        state=2.0 * sequence * hidden,
        sums=2,
    )


def _matrices(shape: DecoderShape) -> tuple[Matrix, ...]:
    hidden, ffn = shape.hidden, shape.ffn_hidden
    packed = hidden + 2 * shape.kv_hidden
    if shape.is_gated:
        return (
            Matrix(hidden, hidden, 0),
            Matrix(shape.kv_hidden, hidden, 0, count=2),
            Matrix(hidden, hidden, 1),
            Matrix(ffn, hidden, 0, count=2),
            Matrix(hidden, ffn, 1),
            Matrix(hidden, count=2),
        )
    return (
        Matrix(packed, hidden, 0),
        Matrix(packed, cut_dim=0),
        Matrix(hidden, hidden, 1),
        Matrix(ffn, hidden, 0),
        Matrix(ffn, cut_dim=0),
        Matrix(hidden, ffn, 1),
        # Biases of the two rows, weight and bias of two norms.
        Matrix(hidden, count=6),
    )


def _kept(shape: DecoderShape, software: Software) -> dict[str, Bytes]:
    """Bytes from forward to backward, in units of one 16-bit hidden state of the sequence, which is 2 s h."""
    state = 2.0 * shape.sequence * shape.hidden
    keys = shape.kv_heads / shape.heads
    inner = shape.ffn_hidden / shape.hidden
    if shape.is_gated:
        # Both norms keep their input and what they give to the products; queries, keys and values, what attention
        # returns; of the feed-forward layer both halves, the activated one, their product.
        norm = 2 if software.fused_norms else 1 + _COPIES_OF_NORM
        mixed = 2 if software.reference_blocks else 1
        none = Bytes(whole=2 * norm * state, cut=(1 + mixed + 2 * keys + 4 * inner) * state)
        # The input, and what each product with a weight returns, but for the two that tensor ranks sum.
        products = Bytes(whole=state, cut=(1 + 2 * keys + 2 * inner) * state, alone=2 * state)
    else:
        # Equation 2 of Korthikanti et al., without scores: 10 s h whole, 24 s h cut for an inner width of 4 h. Of the
        # former two masks of dropout are 2 s h.
        whole = 4 if software.reference_blocks else 5
        none = Bytes(whole=whole * state, cut=(2 + 2 * keys + 2 * inner) * state)
        products = Bytes(whole=state, cut=(1 + 2 * keys + inner) * state, alone=2 * state)
    return {"none": none, "selective": products, "full": Bytes(whole=state)}


def _first(shape: DecoderShape) -> Part:
    table = Matrix(shape.vocab, shape.hidden, 0)
    learned = (Matrix(shape.learned_positions, shape.hidden),) if shape.learned_positions else ()
    return Part(
        parameters=sum(one.elements for one in (table, *learned)),
        cut_parameters=table.elements,
        matrices=(table, *learned),
        rows=shape.sequence,
        width=shape.hidden,
        state=2.0 * shape.sequence * shape.hidden,
        sums=1,
    )


def _last(shape: DecoderShape) -> Part:
    state = 2.0 * shape.sequence * shape.hidden
    head = Matrix(shape.vocab, shape.hidden, 0)
    norm = Matrix(shape.hidden, count=1 if shape.is_gated else 2)
    return Part(
        parameters=head.elements + norm.elements,
        cut_parameters=head.elements,
        matrices=(head, norm),
        rows=shape.sequence,
        width=shape.hidden,
        matmul_flops=2.0 * shape.sequence * head.elements,
        kept=MappingProxyType({kind: Bytes(whole=2 * state) for kind in KEPT_KINDS}),
        state=state,
        sums=1,
        logits=float(shape.sequence * shape.vocab),
    )
