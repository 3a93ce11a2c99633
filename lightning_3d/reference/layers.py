"""What both reference decoders need: the first weights and the check of a token sequence's length."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def initialise(model: nn.Module, std: float, residual: Iterable[nn.Linear], num_layers: int) -> None:
    """Draws the first weights as GPT-2 does (Radford et al. 2019, section 2.3).

    Weights are normal with deviation ``std``, biases zero. The projections that write into the residual stream are
    smaller by 1/√(2L), since a decoder of L blocks adds 2L of them up.

    Args:
        model: The decoder, whose Linear and Embedding weights are drawn in place.
        std: Deviation of the weights.
        residual: The projections that end a residual branch.
        num_layers: L, the number of blocks.
    """
    ends = set(residual)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            scale = (2 * num_layers) ** -0.5 if module in ends else 1.0
            nn.init.normal_(module.weight, std=std * scale)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def check_length(input_ids: Tensor, max_length: int) -> None:
    """Refuses a sequence that is longer than the model was built for.

    Args:
        input_ids: [batch, length] token ids.
        max_length: The longest sequence that the model takes.

    Raises:
        ValueError: If length > max_length.
    """
    length = input_ids.shape[-1]
    if length > max_length:
        raise ValueError(
            f"a sequence of {length} tokens is longer than the model's max_length={max_length}\n"
            f"  fix: model.max_length={length}, or data.length={max_length}"
        )


def check_divides(name: str, value: int, by_name: str, by: int) -> None:
    """Refuses sizes that do not divide.

    Args:
        name: The argument that must be divisible.
        value: Its value.
        by_name: The argument that must divide it.
        by: Its value.

    Raises:
        ValueError: If ``by`` does not divide ``value``.
    """
    if by < 1 or value % by:
        divisors = [n for n in range(1, value + 1) if value % n == 0]
        raise ValueError(f"{by_name}={by} does not divide {name}={value}\n  valid: {', '.join(map(str, divisors))}")
