"""Copies of modules that a step does not use, as an average of the weights or a frozen teacher, and their originals."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from lightning_3d.graph.parameters import ParameterTable


def unused_copies(module: nn.Module, parameters: ParameterTable, used: Collection[str]) -> dict[str, str]:
    """Returns the original of each parameter of a copy, both by first names.

    A copy is the outermost module without a parameter that is used, whose class, names and shapes are those of a module
    that is used; not a single layer, which may have another's shape by chance.

    Args:
        module: The whole module.
        parameters: Its parameters.
        used: First names of those that the step uses.
    """
    first = {name: row.name for row in parameters.rows for name in row.names}
    parts = {name: part for name, part in module.named_modules() if name and part._modules}
    inside = {name: _inside(part, name, first) for name, part in parts.items()}
    shapes = {name: _shapes(part) for name, part in parts.items()}
    originals = [name for name, found in inside.items() if any(each in used for each in found.values())]
    copies: dict[str, str] = {}
    done = ""
    for name, found in inside.items():
        if not found or (done and name.startswith(f"{done}.")) or any(each in used for each in found.values()):
            continue
        alike = (
            other for other in originals if type(parts[other]) is type(parts[name]) and shapes[other] == shapes[name]
        )
        original = next(alike, None)
        if original is not None:
            done = name
            copies |= {copy: inside[original][relative] for relative, copy in found.items()}
    return copies


def _inside(part: nn.Module, prefix: str, first: Mapping[str, str]) -> dict[str, str]:
    """The first names of a part's parameters by their names in it."""
    return {name: first[f"{prefix}.{name}"] for name, _ in part.named_parameters()}


def _shapes(part: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in part.named_parameters()}
