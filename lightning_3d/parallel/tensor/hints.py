"""What Hugging Face's own plans say of experts: hints for local regions, each of which has to prove itself.

Styles of dense layers are not read: tracing finds better ones. ``transformers`` is not imported; its models carry
the plan as an attribute, names of layers with ``*`` for numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from torch import nn

# Modules that run on their local weights, with one sum of their outputs.
_STYLES = frozenset({"moe_tp_experts"})


def hinted_regions(module: nn.Module) -> tuple[str, ...]:
    """Returns the modules that a Hugging Face model inside ``module`` would run on local weights, in module order.

    Args:
        module: Any module; what carries no plan gives nothing.
    """
    found: set[str] = set()
    for prefix, child in module.named_modules():
        globs = [glob for plan in _plans(child) for glob, style in plan.items() if style in _STYLES]
        if globs:
            names = [name for name, _ in child.named_modules() if any(fnmatchcase(name, glob) for glob in globs)]
            found.update(f"{prefix}.{name}" if prefix else name for name in names)
    return tuple(name for name, _ in module.named_modules() if name in found)


def _plans(model: nn.Module) -> list[Mapping[str, object]]:
    """The plan of a model, and that of its configuration, whose names are those of the model without a head."""
    read = (getattr(model, "_tp_plan", None), getattr(getattr(model, "config", None), "base_model_tp_plan", None))
    return [plan for plan in read if isinstance(plan, Mapping)]
