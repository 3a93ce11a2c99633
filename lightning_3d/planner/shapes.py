"""What a prediction is asked about: the shape of a decoder, a mesh and a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_3d.config.batch import local_batch_size
from lightning_3d.errors import BatchError, ConfigError, MeshError
from lightning_3d.mesh.spec import AXIS_KEYS


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A decoder of equal blocks, as papers tell it.

    Attributes:
        layers: Number of blocks.
        hidden: Width of the residual stream.
        heads: Query heads of a block.
        kv_heads: Key and value heads of a block.
        ffn_hidden: Width inside the feed-forward layer.
        vocab: Rows of the embedding.
        sequence: Tokens of a sample.
        gated: Three matrices in the feed-forward layer, RMSNorm and rotary positions as in Llama, no biases; False is
            GPT's form. None: gated if ``ffn_hidden`` is not 4 x ``hidden``, or keys are shared between heads.
        tied: Embedding and head are one parameter. None: as GPT, not as Llama.
        positions: Rows of a table of learned positions. None: ``sequence`` in GPT's form, none in Llama's.

    Raises:
        ConfigError: A size is no positive integer, or heads do not divide.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn_hidden: int
    vocab: int
    sequence: int
    gated: bool | None = None
    tied: bool | None = None
    positions: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "sequence"):
            _check_positive(name, getattr(self, name))
        for name, divisor, whole in (("hidden", "heads", self.hidden), ("heads", "kv_heads", self.heads)):
            if whole % getattr(self, divisor):
                raise ConfigError(
                    f"{divisor}={getattr(self, divisor)} does not divide {name}={whole}.",
                    valid=_divisors_near(whole, getattr(self, divisor)),
                )

    @property
    def is_gated(self) -> bool:
        """Whether the blocks have Llama's form."""
        if self.gated is not None:
            return self.gated
        return self.ffn_hidden != 4 * self.hidden or self.kv_heads != self.heads

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head are one parameter."""
        return not self.is_gated if self.tied is None else self.tied

    @property
    def learned_positions(self) -> int:
        """Rows of the table of learned positions."""
        if self.positions is not None:
            return self.positions
        return 0 if self.is_gated else self.sequence

    @property
    def kv_hidden(self) -> int:
        """Width of keys, and of values."""
        return self.hidden * self.kv_heads // self.heads


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """The degrees of a mesh and what the axes do; names and meanings are those of ``Mesh3DStrategy``.

    Attributes:
        data_parallel_size: Degree of the data axis, replicas included.
        data_replicate_size: Replicas inside the data axis.
        pipeline_parallel_size: Degree of the pipeline axis.
        tensor_parallel_size: Degree of the tensor axis.
        zero_stage: 0 to 3.
        stages_per_rank: Stages that each pipeline rank owns.
        sequence_parallel: The sequence is cut between the parts that the tensor axis cuts.
        layers_per_stage: Blocks of each stage in model order; None: so that the largest stage computes least.
        rank_order: Axes over the ranks, outermost first.

    Raises:
        MeshError: A degree is impossible.
    """

    data_parallel_size: int
    data_replicate_size: int = 1
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    zero_stage: int = 1
    stages_per_rank: int = 1
    sequence_parallel: bool = False
    layers_per_stage: tuple[int, ...] | None = None
    rank_order: str = ",".join(AXIS_KEYS)

    def __post_init__(self) -> None:
        for name in (
            "data_parallel_size",
            "data_replicate_size",
            "pipeline_parallel_size",
            "tensor_parallel_size",
            "stages_per_rank",
        ):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise MeshError(f"{name}={value!r} is not a positive integer.", valid="1, 2, 3, ...", fix=f"{name}=1")
        if self.zero_stage not in (0, 1, 2, 3):
            raise MeshError(f"zero_stage={self.zero_stage!r} does not exist.", valid=(0, 1, 2, 3))
        if self.data_parallel_size % self.data_replicate_size:
            raise MeshError(
                f"data_replicate_size={self.data_replicate_size} does not divide "
                f"data_parallel_size={self.data_parallel_size}.",
                fix=f"data_replicate_size={math.gcd(self.data_parallel_size, self.data_replicate_size)}",
            )
        if sorted(self.rank_order.split(",")) != sorted(AXIS_KEYS):
            raise MeshError(
                f"rank_order={self.rank_order!r} does not name every axis once.",
                valid=f"a permutation of {','.join(AXIS_KEYS)}, outermost first",
            )

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return self.data_parallel_size * self.pipeline_parallel_size * self.tensor_parallel_size

    @property
    def shards(self) -> int:
        """Ranks among which the data axis divides."""
        return self.data_parallel_size // self.data_replicate_size

    def stride(self, axis: str) -> int:
        """Returns how far neighbours on an axis are apart in ranks."""
        sizes = {
            "data": self.data_parallel_size,
            "pipeline": self.pipeline_parallel_size,
            "tensor": self.tensor_parallel_size,
        }
        order = self.rank_order.split(",")
        return math.prod(sizes[inner] for inner in order[order.index(axis) + 1 :])

    def __str__(self) -> str:
        parts = [f"data {self.data_parallel_size}"]
        if self.data_replicate_size > 1:
            parts[0] += f" ({self.data_replicate_size} replicas x {self.shards})"
        parts += [f"pipeline {self.pipeline_parallel_size}", f"tensor {self.tensor_parallel_size}"]
        text = f"{' x '.join(parts)}, ZeRO {self.zero_stage}"
        if self.stages_per_rank > 1:
            text += f", {self.stages_per_rank} stages per rank"
        if self.sequence_parallel:
            text += ", sequence parallel"
        return text if self.rank_order == ",".join(AXIS_KEYS) else f"{text}, ranks ordered {self.rank_order}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchShape:
    """What an optimizer step consumes, in samples.

    Attributes:
        global_size: Of all data ranks together.
        micro_size: Of a micro-batch on one data rank.

    Raises:
        BatchError: A size is no positive integer.
    """

    global_size: int
    micro_size: int

    def __post_init__(self) -> None:
        for name in ("global_size", "micro_size"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise BatchError(f"{name}={getattr(self, name)!r} is not a positive integer.", valid="1, 2, 3, ...")

    def microbatches(self, data_size: int) -> int:
        """Returns the micro-batches of a data rank.

        Args:
            data_size: Degree of the data axis.

        Raises:
            BatchError: The data ranks cannot get equal shares, or the share is less than a micro-batch.
        """
        local = local_batch_size(self.global_size, data_size)
        if self.micro_size > local:
            raise BatchError(
                f"a micro-batch of {self.micro_size} samples is more than the {local} that each of {data_size} data "
                f"ranks gets of {self.global_size}.",
                valid=f"1 to {local}",
                fix=f"batch.micro_size={local}",
            )
        return -(-local // self.micro_size)


def _check_positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name}={value!r} is not a positive integer.", valid="1, 2, 3, ...")


def _divisors_near(whole: int, wanted: int) -> tuple[int, ...]:
    divisors = [number for number in range(1, min(whole, 4096) + 1) if whole % number == 0]
    return tuple(sorted(sorted(divisors, key=lambda number: abs(number - wanted))[:6]))
