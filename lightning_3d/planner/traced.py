"""From a traced module to a model that can be priced, for modules that no formula knows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from lightning_3d.plan.traced import TracedModel, TracedPart
from lightning_3d.planner.model import BlockModel, Bytes, Matrix, Part

# Of what a block keeps, the inputs and results of its norms stay whole on each tensor rank: four hidden states.
_WHOLE_STATES = 4
# In a block the tensor axis sums twice, as in any of attention and MLP.
_SUMS = 2
_HEADS = ("num_attention_heads", "n_head", "num_heads", "num_key_value_heads")


def traced_model(traced: TracedModel, module: nn.Module, *, samples: int) -> BlockModel:
    """Returns the price of a module's parts.

    What a trace does not show is assumed: the tensor axis divides all weights of a block, scores are not masked.

    Args:
        traced: The module's trace in 16 bit.
        module: The module; its configuration, if it has one as Hugging Face's do, names the heads.
        samples: Of the batch that was traced.
    """
    known: dict[tuple[object, ...], Part] = {}
    blocks = []
    for one in traced.blocks:
        key = (one.parameters, one.weight_flops, one.activation_flops, one.output, *one.kept.values())
        if key not in known:
            known[key] = _block(one, samples, _matrices(module, one.name))
        blocks.append(known[key])
    state = blocks[-1].state
    logits = traced.logits / 2 / samples
    last = Part(
        parameters=traced.last.parameters,
        cut_parameters=traced.last.parameters,
        rows=blocks[-1].rows,
        width=blocks[-1].width,
        matmul_flops=traced.last.flops / samples,
        kept=MappingProxyType({"none": Bytes(whole=2 * state)}),
        state=state,
        sums=1,
        logits=logits,
    )
    first = Part(
        parameters=traced.first.parameters,
        cut_parameters=traced.first.parameters,
        rows=blocks[0].rows,
        width=blocks[0].width,
        matmul_flops=traced.first.flops / samples,
        state=blocks[0].state,
        sums=1,
    )
    return BlockModel(blocks=tuple(blocks), first=first, last=last, heads=_heads(module))


def _matrices(module: nn.Module, name: str) -> tuple[Matrix, ...]:
    """The parameters of a block, whose rows the data axis pads. What the tensor axis cuts of them is not known."""
    try:
        block = module.get_submodule(name)
    except AttributeError:
        return ()
    shapes = Counter(tuple(parameter.shape) for parameter in block.parameters() if parameter.dim())
    return tuple(Matrix(shape[0], math.prod(shape[1:]), count=count) for shape, count in shapes.items())


def _block(one: TracedPart, samples: int, matrices: tuple[Matrix, ...]) -> Part:
    state = one.output / samples
    rows = max(1, round(one.weight_flops / samples / (2 * max(one.parameters, 1))))
    return Part(
        parameters=one.parameters,
        cut_parameters=one.parameters,
        matrices=matrices,
        rows=rows,
        width=max(1, round(state / 2 / rows)),
        matmul_flops=one.weight_flops / samples,
        attention_flops=one.activation_flops / samples,
        again_flops=one.again_flops / samples,
        kept=MappingProxyType(_kept(one.kept, state, samples)),
        state=state,
        sums=_SUMS,
    )


def _kept(kept: Mapping[str, int], state: float, samples: int) -> dict[str, Bytes]:
    # A block that computes again holds its input, which autograd does not save.
    sizes = {kind: size / samples for kind, size in kept.items()}
    whole = min(sizes["none"], _WHOLE_STATES * state)
    # As many products as the tensor axis sums.
    summed = min(sizes["selective"], _SUMS * state)
    return {
        "none": Bytes(whole=whole, cut=sizes["none"] - whole),
        "selective": Bytes(whole=state, cut=sizes["selective"] - summed, alone=summed),
        "full": Bytes(whole=state),
    }


def _heads(module: nn.Module) -> tuple[int, ...]:
    """Heads that the configurations inside a module name."""
    found = []
    for child in module.modules():
        config = getattr(child, "config", None)
        found += [value for name in _HEADS if isinstance(value := getattr(config, name, None), int)]
    return tuple(dict.fromkeys(found))
