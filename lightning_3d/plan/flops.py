"""The floating point operations of a step, counted in one run without values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.data import extract_batch_size

from lightning_3d.errors import user_line
from lightning_3d.graph.stand_ins import without_values
from lightning_3d.log import get_logger, info_on_first_rank
from lightning_3d.parallel.pipeline.record.flops import CountsFlops

_log = get_logger(__name__)
# A forward and a backward: each product of the forward has two in the backward, one for each of its inputs.
_PASSES = 3


def sample_flops(module: LightningModule, args: tuple[Any, ...], step: Callable[[], Any] | None = None) -> float | None:
    """Returns the operations of matrix products, convolutions and attention in a forward and a backward of a sample.

    They are those of the model, as Chowdhery et al. 2022, "PaLM", appendix B, count them: what is computed again for
    activation checkpointing, or on several ranks alike, does not count, and attention counts all scores.

    Args:
        module: The whole module, real or on the meta device; it is left as it was.
        args: A real batch, and the other arguments of ``training_step``.
        step: Calls the step with them, as the Trainer would; None for a plain call.

    Returns:
        The operations; None if the step does not run without values, which is told.
    """
    counts: list[float] = []
    try:
        with without_values(module), CountsFlops(lambda count, _: counts.append(count)):
            module.training_step(*args) if step is None else step()
        samples = extract_batch_size(args[0])
    except Exception as error:
        # Whatever a user's step does without values, a figure in the log is no reason to end a training.
        info_on_first_rank(_log, f"operations are not counted: {type(error).__name__}: {error} ({user_line(error)})")
        return None
    return _PASSES * sum(counts) / samples
