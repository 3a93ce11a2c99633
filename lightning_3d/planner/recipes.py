"""Recipes of bytes per parameter: what weights, gradients and optimizer state weigh, and what of it ZeRO divides.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", section 5 and figure 1:
stage 1 divides the optimizer's bytes by the shards, stage 2 the gradients' too, stage 3 the weights' too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lightning_3d.errors import ConfigError, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteRecipe:
    """Bytes per parameter.

    Attributes:
        weights: Of the copy that the computation reads.
        gradients: Of the gradients as they wait for the optimizer.
        optimizer: Of its state, 32-bit master weights included.
        unsharded: Of what no stage divides.
        shard: Of the shard that FSDP2 holds beside the gathered weights at stages 1 and 2; 0 where the master weights
            are the shard.
        weights_divided: Of the weights at stage 3: 0 where they are made from the master weights as they are gathered.
        gradients_divided: Of the gradients once they are divided.
        gradients_from: The first stage that divides the gradients.
        computed: Of an element of an activation.
        reduced: Of an element of a gradient as it travels.
        source: Where the figures come from.
    """

    weights: float
    gradients: float
    optimizer: float
    unsharded: float = 0.0
    shard: float = 0.0
    weights_divided: float | None = None
    gradients_divided: float | None = None
    gradients_from: int = 2
    computed: float = 2.0
    reduced: float = 2.0
    source: str = ""

    @property
    def per_parameter(self) -> float:
        """Bytes of a parameter on one device."""
        return self.weights + self.gradients + self.optimizer + self.unsharded

    def states(self, parameters: float, *, zero_stage: int, shards: int) -> ModelStates:
        """Returns the bytes of weights, gradients and optimizer state of some parameters on one rank.

        Args:
            parameters: Elements.
            zero_stage: 0 to 3.
            shards: Ranks among which the data axis divides.
        """
        weights, gradients = self.weights + self.unsharded, self.gradients
        if zero_stage in (1, 2) and shards > 1:
            weights += self.shard / shards
        if zero_stage == 3:
            divided = self.weights if self.weights_divided is None else self.weights_divided
            weights = divided / shards + self.unsharded
        if zero_stage >= self.gradients_from:
            divided = self.gradients if self.gradients_divided is None else self.gradients_divided
            gradients = divided / shards
        optimizer = self.optimizer / (shards if zero_stage else 1)
        return ModelStates(weights * parameters, gradients * parameters, optimizer * parameters)


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Bytes of the model's states on one rank.

    Attributes:
        parameters: Of the weights.
        gradients: Of the gradients.
        optimizer: Of the optimizer's state.
    """

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes of all of them."""
        return self.parameters + self.gradients + self.optimizer


_FSDP2 = "torch's fully_shard: shards as the optimizer keeps them, gathered in the computing precision"

BYTE_RECIPES: Mapping[str, ByteRecipe] = MappingProxyType(
    {
        "zero_paper": ByteRecipe(weights=2, gradients=2, optimizer=12, source="ZeRO paper, section 3.1: 16 bytes"),
        "deepspeed": ByteRecipe(
            weights=2,
            gradients=2,
            optimizer=16,
            gradients_divided=0,
            gradients_from=3,
            source="DeepSpeed's memory estimators: 4 + 16 / N at stage 2, 18 / N at stage 3",
        ),
        "bf16_master": ByteRecipe(
            weights=2,
            gradients=4,
            optimizer=12,
            weights_divided=0,
            reduced=4,
            source=f"{_FSDP2}; 32-bit shards and gradients, AdamW",
        ),
        "pure_bf16": ByteRecipe(weights=2, gradients=2, optimizer=4, shard=2, source=f"{_FSDP2}; all in 16 bit, AdamW"),
        "fp32": ByteRecipe(
            weights=4,
            gradients=4,
            optimizer=8,
            shard=4,
            computed=4,
            reduced=4,
            source=f"{_FSDP2}; all in 32 bit, AdamW",
        ),
        "fp64": ByteRecipe(
            weights=8, gradients=8, optimizer=16, shard=8, computed=8, reduced=8, source="as fp32, twice as long"
        ),
        "autocast": ByteRecipe(
            weights=6,
            gradients=4,
            optimizer=8,
            shard=4,
            weights_divided=4,
            reduced=4,
            source="32-bit weights beside the 16-bit copies that autocast keeps until backward, AdamW",
        ),
        "megatron": ByteRecipe(
            weights=2, gradients=4, optimizer=12, reduced=4, source="Megatron-LM, bf16 with 32-bit main gradients"
        ),
        "bf16_optimizer": ByteRecipe(
            weights=2,
            gradients=2,
            optimizer=12,
            unsharded=4,
            source="Megatron-DeepSpeed's BF16_Optimizer: 32-bit gradient accumulators that no rank divides",
        ),
    }
)


def byte_recipe(name: str) -> ByteRecipe:
    """Returns the recipe of a name.

    Raises:
        ConfigError: There is none.
    """
    found = BYTE_RECIPES.get(name)
    if found is None:
        close = nearest(name, BYTE_RECIPES)
        raise ConfigError(
            f"there is no recipe of bytes {name!r}.",
            valid=BYTE_RECIPES,
            fix=f"bytes_recipe={close}" if close else None,
        )
    return found
