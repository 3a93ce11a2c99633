"""What the training software does with a mesh, beyond the mesh itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Habits of a training program; the defaults are those of this library on torch.

    Attributes:
        fused_attention: Attention never writes its scores, and skips those that a causal mask hides.
        overlaps_data: Gathers and reductions of the data axis run beside the computation.
        overlaps_sends: A rank computes on while a stage's result is on its way, as in torch's schedules.
        overlaps_tensor: So do the sums of the tensor axis.
        selective: What "selective" checkpointing keeps: the "products" with weights, or all but the core of
            "attention" (Korthikanti et al. 2022).
        shards_by_unit: The data axis gathers and reduces block by block, as torch's fully_shard does.
        scatters_boundaries: Tensor ranks share out what a stage sends, instead of each sending all of it.
        buffers_per_microbatch: A pipeline receives each micro-batch into memory of its own, as torch's schedules do.
        logit_bytes: Bytes of each logit from the head to the loss and back: 16-bit logits, their 32-bit copy and its
            gradient, and 16-bit gradients where the softmax is not fused.
        reduced: Bytes of a gradient's element as it travels; None: those of the recipe.
        gathered: Bytes of a weight's element as it is gathered; None: those of the recipe.
        float8: Products with weights run in 8 bit.
        reference_blocks: Decoders keep what this library's reference models do: no masks of dropout, and in Llama's
            form a copy of what attention returns, which lies head by head as rotated queries do. False: as papers do.
        fused_norms: RMSNorm is one operation that keeps its input, as torch's is on a GPU. False: the many operations
            that it is on a CPU, a trace and a dry run included, which keep 32-bit copies.
    """

    fused_attention: bool = True
    overlaps_data: bool = True
    overlaps_sends: bool = True
    overlaps_tensor: bool = False
    selective: Literal["products", "attention"] = "products"
    shards_by_unit: bool = True
    scatters_boundaries: bool = False
    buffers_per_microbatch: bool = True
    logit_bytes: float = 14.0
    reduced: float | None = None
    gathered: float | None = None
    float8: bool = False
    reference_blocks: bool = True
    fused_norms: bool = True


THIS_LIBRARY = Software()
# As published in 2021 and 2022: attention writes its scores, gradients are reduced after the last backward, ranks wait
# for what they send, the softmax of the loss is fused.
MEGATRON = Software(
    fused_attention=False,
    overlaps_data=False,
    overlaps_sends=False,
    selective="attention",
    shards_by_unit=False,
    scatters_boundaries=True,
    buffers_per_microbatch=False,
    logit_bytes=10.0,
    reduced=2.0,
    reference_blocks=False,
)
