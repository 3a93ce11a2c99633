"""The user's `tensor_plan`: globs of names to styles, which go before everything that is found.

A glob names modules or parameters as the model does (``blocks.3.attn.qkv``); ``*`` also stands for dots. The last glob
that matches a name decides, so general ones come first, as in a list of ignored files. A module's column, row or vocab
style is that of the weights it owns itself; replicate is for everything below it; local makes it a local region.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal, cast

from torch import nn

from lightning_3d.errors import PlanError, nearest
from lightning_3d.graph.parameters import ParameterInfo, ParameterTable
from lightning_3d.shards.layout import Layout

Kind = Literal["column", "row", "vocab", "replicate", "local"]
_STYLES = ("column", "column:<segments>", "row", "vocab", "replicate", "local")
# What an error lists: the sizes of a group inside one or a few machines.
_DEGREES = range(1, 65)
_STYLE = re.compile(r"(column)(?::([1-9]\d*))?|(row|vocab|replicate|local)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ForcedStyle:
    """What the user says of a weight.

    Attributes:
        kind: "column", "row", "vocab", "replicate" or "local".
        segments: Equal segments that a column weight is packed of.
        glob: The user's glob.
    """

    kind: Kind
    segments: int = 1
    glob: str

    def refused(self, name: str, reason: str, *, valid: object = None) -> PlanError:
        """Returns the error of a style that cannot be exact.

        Args:
            name: The weight or module it was for.
            reason: What stands in the way, with the numbers.
            valid: What would do.
        """
        return PlanError(
            f"tensor_plan[{self.glob!r}]={str(self)!r} cannot be exact for {name}: {reason}.",
            valid=valid,
            fix=f"tensor_plan={{{self.glob!r}: 'replicate'}}, or leave it out and see explain=true",
        )

    def __str__(self) -> str:
        return self.kind if self.segments == 1 else f"{self.kind}:{self.segments}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """What the user decided.

    Attributes:
        styles: By the first name of a parameter; "local" is not among them.
        regions: By the name of a module: what is to be a local region; none lies in another.
    """

    styles: Mapping[str, ForcedStyle] = field(default_factory=dict)
    regions: Mapping[str, ForcedStyle] = field(default_factory=dict)

    @property
    def replicated(self) -> frozenset[str]:
        """Parameters that must not be cut."""
        return frozenset(name for name, style in self.styles.items() if style.kind == "replicate")


def plan_overrides(
    module: nn.Module,
    parameters: ParameterTable,
    tensor_plan: Mapping[str, str] | None,
    degree: int,
    *,
    pad_vocabulary: bool = False,
) -> Overrides:
    """Returns what a `tensor_plan` says of each parameter and module.

    Args:
        module: The whole module; only names and kinds of its parts are read.
        parameters: Its parameters.
        tensor_plan: Globs to styles.
        degree: Number of tensor-parallel ranks.
        pad_vocabulary: Whether a vocabulary may be cut unevenly.

    Raises:
        PlanError: A glob matches nothing, a style is unknown, or one cannot be exact by the sizes alone. What only
            the run of a step shows (a row weight whose input is whole) is found later.
    """
    modules = dict(module.named_modules())
    styles: dict[str, ForcedStyle] = {}
    regions: dict[str, ForcedStyle] = {}
    for glob, text in (tensor_plan or {}).items():
        style = _parsed(glob, text)
        matched = [name for name in modules if name and fnmatchcase(name, glob)]
        rows = [row for row in parameters.rows if any(fnmatchcase(name, glob) for name in row.names)]
        if not matched and not rows:
            raise _matches_nothing(glob, modules, parameters)
        if style.kind == "local":
            regions.update(dict.fromkeys(_local(matched, style), style))
            continue
        for name in matched:
            regions.pop(name, None)
        own = [row for name in matched for row in _weights(name, modules, parameters, style)]
        if not own and not rows:
            raise _without_weights(style, matched, modules)
        styles.update({row.name: style for row in (*own, *rows)})
    for row in parameters.rows:
        if row.name in styles:
            _check(row, styles[row.name], modules, degree, pad_vocabulary)
    return Overrides(styles=styles, regions=dict(_outermost(regions)))


def _parsed(glob: str, text: str) -> ForcedStyle:
    found = _STYLE.fullmatch(text)
    if found is None:
        meant = nearest(text, ("column", "row", "vocab", "replicate", "local"))
        raise PlanError(
            f"tensor_plan[{glob!r}] has the unknown style {text!r}.",
            valid=_STYLES,
            fix=f"tensor_plan={{{glob!r}: {meant or 'replicate'!r}}}",
        )
    return ForcedStyle(kind=cast("Kind", found[1] or found[3]), segments=int(found[2] or 1), glob=glob)


def numberless(name: str) -> str:
    """Returns a name with ``*`` for the numbers in it: what repeated layers have in common."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


# ---- what a glob stands for ----


def _local(matched: list[str], style: ForcedStyle) -> list[str]:
    if not matched:
        raise PlanError(
            f"tensor_plan[{style.glob!r}]='local' names parameters alone.",
            valid="a glob of modules, which run on their local weights with one sum of their outputs",
            fix=f"tensor_plan={{'<module that owns {style.glob}>': 'local'}}",
        )
    return matched


def _weights(
    name: str, modules: Mapping[str, nn.Module], parameters: ParameterTable, style: ForcedStyle
) -> Iterator[ParameterInfo]:
    """What a style of a module is for: all below it if replicated, else its own weights; biases follow theirs."""
    if style.kind == "replicate":
        yield from (row for row in parameters.rows if any(each.startswith(f"{name}.") for each in row.names))
        return
    own = {f"{name}.{key}" for key, value in modules[name].named_parameters(recurse=False) if value.dim() > 1}
    yield from (row for row in parameters.rows if own.intersection(row.names))


def _outermost(regions: Mapping[str, ForcedStyle]) -> Iterator[tuple[str, ForcedStyle]]:
    for name, style in regions.items():
        if not any(name.startswith(f"{other}.") for other in regions):
            yield name, style


def _matches_nothing(glob: str, modules: Mapping[str, nn.Module], parameters: ParameterTable) -> PlanError:
    names = [*modules, *(name for row in parameters.rows for name in row.names)]
    spelled = {numberless(name) for name in names if name}
    # "*.qvk" is nearer to "*.qkv" than to any full name.
    spelled |= {f"*.{name.rsplit('.', 1)[-1]}" for name in spelled if not name.endswith("*")}
    near = nearest(glob, sorted(spelled))
    return PlanError(
        f"tensor_plan has {glob!r}, which matches no module and no parameter.",
        valid=None if near is None else f"names of the model, such as {near!r}",
        fix=f"tensor_plan={{{near or '<name of a module>'!r}: ...}}",
    )


def _without_weights(style: ForcedStyle, matched: list[str], modules: Mapping[str, nn.Module]) -> PlanError:
    name = matched[0]
    below = [
        f"{name}.{key}"
        for key, child in modules[name].named_modules()
        if key and any(value.dim() > 1 for value in child.parameters(recurse=False))
    ]
    return PlanError(
        f"tensor_plan[{style.glob!r}]={str(style)!r} names {name}, which owns no weight matrix itself.",
        valid=[numberless(each) for each in dict.fromkeys(below)] or "modules or parameters with a weight matrix",
        fix=f"tensor_plan={{{numberless(below[0] if below else '<a weight>')!r}: {str(style)!r}}}",
    )


# ---- sizes ----


def _check(
    row: ParameterInfo, style: ForcedStyle, modules: Mapping[str, nn.Module], degree: int, pad_vocabulary: bool
) -> None:
    """Refuses what the sizes alone show to be impossible."""
    if style.kind == "replicate":
        return
    owners = [modules[name.rpartition(".")[0]] for name in row.names]
    kinds = ", ".join(dict.fromkeys(type(owner).__name__ for owner in owners))
    if style.kind == "vocab" and not any(_is_vocabulary(owner) for owner in owners):
        raise style.refused(row.name, f"its module ({kinds}) is no embedding", valid="an nn.Embedding")
    if style.kind == "row" and all(isinstance(owner, nn.Embedding) for owner in owners):
        raise style.refused(row.name, f"its module ({kinds}) is no linear layer", valid="vocab, column")
    if style.kind == "vocab" and Layout(0, row.shape[:1]).fits(degree, padded=pad_vocabulary):
        return
    word, lengths = _cut_lengths(row, style, owners)
    if not any(length % (style.segments * degree) == 0 for length in lengths):
        raise _undivided(row, style, word, lengths, degree)


def _is_vocabulary(owner: nn.Module) -> bool:
    """Whether a module may look rows up; a linear layer and what is like one does not."""
    return isinstance(owner, nn.Embedding) or not (isinstance(owner, nn.Linear) or _is_transposed(owner))


def _is_transposed(owner: nn.Module) -> bool:
    """Whether a module is linear with a weight of (inputs, outputs), as Hugging Face's Conv1D."""
    weight = getattr(owner, "weight", None)
    return type(owner).__name__ == "Conv1D" and getattr(weight, "ndim", 0) == 2


def _cut_lengths(row: ParameterInfo, style: ForcedStyle, owners: list[nn.Module]) -> tuple[str, tuple[int, ...]]:
    """What the style counts, and the lengths that may be cut; several where only a run shows which."""
    if style.kind == "vocab":
        return "rows of its vocabulary", row.shape[:1]
    if style.kind == "column":
        dims = [dim for owner in owners for dim in _output_dims(owner)]
    else:
        dims = [1 - dim for owner in owners if not isinstance(owner, nn.Embedding) for dim in _output_dims(owner)]
    lengths = row.shape if len(row.shape) != 2 else tuple(dict.fromkeys(row.shape[dim] for dim in dims))
    return ("output features" if style.kind == "column" else "input features"), lengths


def _output_dims(owner: nn.Module) -> tuple[int, ...]:
    """The dims of a weight matrix that may count outputs."""
    if isinstance(owner, nn.Embedding) or _is_transposed(owner):
        return (1,)
    return (0,) if isinstance(owner, nn.Linear) else (0, 1)


def _undivided(row: ParameterInfo, style: ForcedStyle, word: str, lengths: tuple[int, ...], degree: int) -> PlanError:
    counted = " or ".join(str(length) for length in lengths)
    in_parts = f" in {style.segments} segments" if style.segments > 1 else ""
    degrees = [ranks for ranks in _DEGREES if any(length % (style.segments * ranks) == 0 for length in lengths)]
    if style.segments > 1 and not degrees:
        return style.refused(row.name, f"it has {counted} {word}, which are no {style.segments} equal segments")
    return style.refused(
        row.name,
        f"it has {counted} {word}{in_parts}, which {degree} ranks do not divide",
        valid=f"tensor_parallel_size of {', '.join(map(str, degrees))}"
        + (", or pad_vocabulary=true" if style.kind == "vocab" else ""),
    )
