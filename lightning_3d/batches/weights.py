"""What a loss is divided by: over micro-batches, data ranks and accumulation. The only place that decides it.

A step returns l, the mean over the n samples of its micro-batch. Without weights the mean of a batch is
sum(n l) / sum(n), data ranks are averaged, and accumulation divides by ``accumulate_grad_batches`` (Lightning's
meaning, also in a short last window). A step that returns ``loss_weight`` w (for instance its number of valid tokens)
asks for one sum(w l) / sum(w) over everything that makes an optimizer step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.errors import BatchError

LOSS = "loss"
LOSS_WEIGHT = "loss_weight"


def loss_of(output: Any) -> Tensor | None:
    """Returns the loss in what a training step returned: a tensor, a mapping with "loss", or None."""
    if isinstance(output, Mapping):
        found = output.get(LOSS)
        return found if isinstance(found, Tensor) else None
    return output if isinstance(output, Tensor) else None


def weight_of(output: Any) -> float | None:
    """Returns the ``loss_weight`` that a step returned beside its loss, or None.

    Raises:
        BatchError: It is no single number, or below zero.
    """
    if not isinstance(output, Mapping) or LOSS_WEIGHT not in output:
        return None
    value = output[LOSS_WEIGHT]
    if isinstance(value, Tensor) and value.numel() != 1:
        raise BatchError(f"loss_weight has {value.numel()} elements.", valid="one number", fix="return its sum")
    weight = float(value)
    if not weight >= 0:
        raise BatchError(f"loss_weight={weight} is not a weight.", valid="a number >= 0")
    return weight


def shares(sizes: Sequence[float]) -> list[float]:
    """Returns the part of each micro-batch in the mean of its batch; equal parts if all weigh nothing."""
    total = sum(sizes)
    return [size / total for size in sizes] if total else [1 / len(sizes)] * len(sizes)


@dataclass(slots=True)
class WeightedWindow:
    """The weights met since the last optimizer step, and whether the steps return any.

    Attributes:
        total: Sum of this rank's weights.
        weighted: True once a step of the window returned a weight.
        plain: True once a step of the window returned none.
    """

    total: float = field(default=0.0)
    weighted: bool = field(default=False)
    plain: bool = field(default=False)

    def add(self, weight: float | None) -> None:
        """Takes the weight of one micro-batch.

        Raises:
            BatchError: Some steps of one window return a weight and some do not.
        """
        if weight is None:
            self.plain = True
        else:
            self.weighted = True
            self.total += weight
        if self.weighted and self.plain:
            raise BatchError(
                "some micro-batches of one optimizer step returned loss_weight and some did not.",
                fix='return {"loss": ..., "loss_weight": ...} from every training_step, or from none',
            )

    def gradient_factor(self, group: dist.ProcessGroup | None, device: torch.device) -> Tensor | None:
        """Returns what the window's gradients must be multiplied by, and opens the next window.

        Gradients hold the mean over data ranks of each rank's sum(w l); the weighted mean is that times
        ranks / sum over ranks of w. None where steps return no weight. A collective call on the data axis if they do.

        Raises:
            BatchError: All weights of the window are zero.
        """
        if not self.weighted:
            self.plain = False
            return None
        total = torch.tensor(self.total, dtype=torch.float64, device=device)
        ranks = 1
        if group is not None:
            ranks = group.size()
            dist.all_reduce(total, group=group)
        self.total, self.weighted, self.plain = 0.0, False, False
        if float(total) == 0:
            raise BatchError("loss_weight is 0 for every micro-batch of an optimizer step.", valid="a sum above 0")
        return ranks / total
