"""Batch arithmetic: from the samples of one training step to the batch of a rank and its micro-batches."""

from __future__ import annotations

from lightning_3d.errors import BatchError

# Micro-batches for each rank of a pipeline where nothing is said. Of m micro-batches on p ranks a step waits (p - 1) /
# (m + p - 1) of its time (Huang et al. 2019, "GPipe", 3.2): less than a fifth for m = 4 p.
MICROBATCHES_PER_RANK = 4


def local_batch_size(global_size: int, data_size: int) -> int:
    """Returns how many samples of a batch one data rank gets.

    Args:
        global_size: Samples of one batch over all data ranks.
        data_size: Degree of the data axis.

    Raises:
        BatchError: The data ranks cannot get equal shares.
    """
    if global_size < 1:
        raise BatchError(f"batch.global_size={global_size} holds no sample", valid="an integer of at least 1")
    if global_size % data_size == 0:
        return global_size // data_size
    below = global_size // data_size * data_size
    sizes = [size for size in (below, below + data_size) if size > 0]
    degrees = [degree for degree in range(1, min(global_size, 2 * data_size) + 1) if global_size % degree == 0]
    raise BatchError(
        f"batch.global_size={global_size} does not divide into {data_size} data ranks of equal share",
        valid=f"batch.global_size {_either(sizes)}, or a data degree of {_either(degrees)}",
        fix=f"batch.global_size={min(sizes, key=lambda size: abs(size - global_size))}",
    )


def num_microbatches(local_batch: int, *, micro_batch_size: int | None, requested: int | str, pipeline: int) -> int:
    """Returns into how many micro-batches one rank's batch is sliced.

    Args:
        local_batch: Samples of the batch on one data rank.
        micro_batch_size: Most samples of one micro-batch, or None.
        requested: ``num_microbatches`` as asked for: a number, or "auto".
        pipeline: Degree of the pipeline axis.

    Raises:
        BatchError: The batch is empty or too small, or both requests are set and disagree.
    """
    if local_batch < 1:
        raise BatchError("a batch without samples cannot be sliced into micro-batches", valid="1 sample or more")
    by_size = None if micro_batch_size is None else -(-local_batch // micro_batch_size)
    if isinstance(requested, str):
        if by_size is not None:
            return by_size
        return 1 if pipeline == 1 else min(local_batch, MICROBATCHES_PER_RANK * pipeline)
    if requested > local_batch:
        raise BatchError(
            f"num_microbatches={requested} is more than the {local_batch} samples of a rank's batch",
            valid=f"1 to {local_batch}",
            fix="a smaller num_microbatches or a larger batch",
        )
    if by_size is not None and by_size != requested:
        raise BatchError(
            f"num_microbatches={requested} and micro_batch_size={micro_batch_size} disagree: "
            f"{local_batch} samples of a rank make {by_size} micro-batches of at most {micro_batch_size}",
            valid=f"num_microbatches={by_size}, or one of the two left out",
        )
    return requested


def _either(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)
