"""Weights whose files name or cut them otherwise than the model: transformers renames and joins them while it loads.

Its own tables say how. What they join without computing, experts one after the other and projections side by side, is
read here as parts of one tensor, each rank what it holds of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lightning_3d.checkpoint.huggingface import HuggingFaceTensors, Part
from lightning_3d.checkpoint.sources import Form

# Stored names by the pattern of a table that they match.
_Found = dict[str, list[str]]


def as_transformers_loads(source: HuggingFaceTensors, module: nn.Module) -> HuggingFaceTensors:
    """Returns the weights under the names, and in the shapes, that a model of transformers has them.

    Args:
        source: The weights as they are stored.
        module: A module that holds models of transformers, or none.
    """
    for model in _models(module):
        source = _of_model(source, model)
    return source


def _models(module: nn.Module) -> list[Any]:
    """Returns the outermost models of transformers in a module; none if nobody has imported it."""
    transformers = sys.modules.get("transformers")
    kind = getattr(transformers, "PreTrainedModel", None)
    if kind is None:
        return []
    found = {name: part for name, part in module.named_modules() if isinstance(part, kind)}
    return [part for name, part in found.items() if not any(name != n and _is_inside(name, n) for n in found)]


def _is_inside(name: str, outer: str) -> bool:
    return outer == "" or name.startswith(f"{outer}.")


def _of_model(source: HuggingFaceTensors, model: Any) -> HuggingFaceTensors:
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    except ImportError:
        return source
    tables = get_model_conversion_mapping(model)
    renamings = [each for each in tables if isinstance(each, WeightRenaming)]
    converters = [each for each in tables if isinstance(each, WeightConverter) and _only_joins(each)]
    # Several patterns of one converter lead to one name.
    joined: dict[str, tuple[Any, _Found]] = {}
    parts: dict[str, Sequence[Part]] = {}
    forms: dict[str, Form] = {}
    for name in sorted(source.forms, key=_in_order):
        new, pattern = rename_source_key(name, renamings, converters)
        converter = next((each for each in converters if pattern in each.source_patterns), None)
        if converter is None:
            form = source.forms[name]
            forms[new], parts[new] = form, source.parts[name]
            continue
        joined.setdefault(new, (converter, {}))[1].setdefault(str(pattern), []).append(name)
    for new, (converter, found) in joined.items():
        whole = _joined(source.forms, converter, found)
        if whole is None:
            return source
        parts[new], forms[new] = whole
    return source.joined(parts, forms)


def _only_joins(converter: Any) -> bool:
    """Returns whether a converter stacks experts, or puts tensors side by side, or does one after the other."""
    kinds = [type(operation).__name__ for operation in converter.operations]
    return len(converter.target_patterns) == 1 and kinds in (
        ["MergeModulelist"],
        ["MergeModulelist", "Concatenate"],
        ["Concatenate"],
    )


def _joined(forms: Mapping[str, Form], converter: Any, found: _Found) -> tuple[list[Part], Form] | None:
    """Returns the parts of one tensor and its form; None if they do not fit together."""
    by_kind = {type(operation).__name__: operation for operation in converter.operations}
    stacked = by_kind["MergeModulelist"].dim if "MergeModulelist" in by_kind else None
    beside = by_kind["Concatenate"].dim if "Concatenate" in by_kind else None
    parts: list[Part] = []
    start = 0
    for pattern in (each for each in converter.source_patterns if each in found):
        names = found[pattern]
        for at, name in enumerate(names):
            sizes = [*forms[name].shape]
            if stacked is not None:
                sizes.insert(stacked, 1)
            offsets = [0] * len(sizes)
            if stacked is not None:
                offsets[stacked] = at
            if beside is not None:
                offsets[beside] = start
                start += sizes[beside] if stacked is None else 0
            parts.append(Part(stored=name, offsets=tuple(offsets), sizes=tuple(sizes), stacked=stacked))
        if beside is not None and stacked is not None:
            start += parts[-1].sizes[beside]
    whole = [max(part.offsets[dim] + part.sizes[dim] for part in parts) for dim in range(len(parts[0].sizes))]
    dtypes = {forms[part.stored].dtype for part in parts}
    covered = sum(torch.Size(part.sizes).numel() for part in parts) == torch.Size(whole).numel()
    same_dims = len({len(part.sizes) for part in parts}) == 1
    return (
        (parts, Form(shape=torch.Size(whole), dtype=dtypes.pop()))
        if covered and same_dims and len(dtypes) == 1
        else None
    )


def _in_order(name: str) -> list[tuple[int, str]]:
    """Sorts numbers in a name as numbers, as transformers does: experts are joined in this order."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"\.", name)]
