"""Memory that is not enough on one rank: what to try, in the order of what it costs, with the values of this run."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lightning_3d.config.batch import MICROBATCHES_PER_RANK
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.mesh.spec import MeshSpec

# How torch says it of the CPU, where it has no class for it.
_OF_THE_HOST = ("can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it comes from, says that memory was not enough."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(seen, RuntimeError) and any(words in str(seen) for words in _OF_THE_HOST):
            return True
        seen = seen.__cause__
    return False


def memory_hint(config: StrategyConfig, spec: MeshSpec) -> str:
    """Returns what to try when memory is not enough, the cheapest first.

    Args:
        config: The options of this run.
        spec: Its mesh.
    """
    planned = "`lightning-3d plan` says which meshes fit, `lightning-3d dryrun` what each rank of one holds and when"
    steps = [*_fewer_samples(config, spec), *_recomputation(config), *_shards(config, spec), *_degrees(spec), planned]
    numbered = [f"  {number}. {step}" for number, step in enumerate(steps, start=1)]
    return "\n".join(["memory was not enough; what to try, in this order:", *numbered])


def _fewer_samples(config: StrategyConfig, spec: MeshSpec) -> Iterator[str]:
    size, count = config.micro_batch_size, config.num_microbatches
    if size is not None and size > 1:
        yield f"micro_batch_size={size // 2}, now {size}"
    elif size is None and isinstance(count, int):
        yield f"num_microbatches={2 * count}, now {count}"
    elif size is None and spec.pipeline == 1:
        yield "num_microbatches=2 or more, now 1"
    elif size is None:
        yield f"micro_batch_size=1, now as large as {MICROBATCHES_PER_RANK * spec.pipeline} micro-batches need"


def _recomputation(config: StrategyConfig) -> Iterator[str]:
    stronger = {"none": "'selective', then 'full'", "selective": "'full'"}.get(config.activation_checkpointing)
    if stronger is not None:
        yield f"activation_checkpointing={stronger}, now '{config.activation_checkpointing}'"


def _shards(config: StrategyConfig, spec: MeshSpec) -> Iterator[str]:
    if config.zero_stage < 3 and spec.data > 1:
        yield f"zero_stage={config.zero_stage + 1}, up to 3, now {config.zero_stage} over {spec.data} data ranks"


def _degrees(spec: MeshSpec) -> Iterator[str]:
    room = "" if spec.data % 2 == 0 else ", with more devices"
    yield f"tensor_parallel_size={2 * spec.tensor}, now {spec.tensor}{room}"
    yield f"pipeline_parallel_size={2 * spec.pipeline}, now {spec.pipeline}{room}"
