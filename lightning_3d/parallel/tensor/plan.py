"""The decisions of the tensor axis: how every parameter is held, why, and what blocks communicate."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch

from lightning_3d.errors import PlanError
from lightning_3d.graph.parameters import ParameterInfo, ParameterTable
from lightning_3d.parallel.tensor.overrides import ForcedStyle, Overrides, numberless
from lightning_3d.parallel.tensor.regions.plan import Region, RegionPlan
from lightning_3d.parallel.tensor.trace.exchanges import Collectives
from lightning_3d.parallel.tensor.trace.observer import Traced
from lightning_3d.shards.layout import Layout
from lightning_3d.units import counted, format_count

Style = Literal["column", "row", "vocab", "replicate", "local"]
Source = Literal["trace", "plan", "hint"]
# Degrees that an error looks at: the sizes of a group inside a machine.
_DEGREES = (2, 3, 4, 5, 6, 7, 8, 12, 16)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterStyle:
    """How one parameter is held.

    Attributes:
        name: Its first name.
        style: What it is cut for.
        layout: How it is cut; None if every rank holds it whole.
        shape: Its global shape.
        reason: Why it is whole, where it could have been cut.
        source: Who decided: the trace, the user's `tensor_plan`, or a hint of the model.
    """

    name: str
    style: Style
    layout: Layout | None
    shape: tuple[int, ...]
    reason: str = ""
    source: Source = "trace"

    @property
    def numel(self) -> int:
        """Elements of the whole."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlan:
    """The tensor axis of one module.

    Attributes:
        size: Number of ranks.
        rows: Every parameter once, in module order.
        traffic: Collectives of each block in one micro-batch; "" stands for all outside of blocks.
        regions: Modules that run on local weights.
        partial: First names of replicated parameters that are used on parts: their gradients are summed together, once
            for each optimizer step.
        sequence: Sequence parallelism.
    """

    size: int
    rows: tuple[ParameterStyle, ...]
    traffic: Mapping[str, Collectives]
    regions: tuple[Region, ...] = ()
    partial: frozenset[str] = frozenset()
    sequence: bool = False

    @property
    def layouts(self) -> dict[str, Layout]:
        """How parameters are cut, by their first names."""
        return {row.name: row.layout for row in self.rows if row.layout is not None}

    @property
    def share(self) -> float:
        """The part of the model's elements that is cut."""
        cut = sum(row.numel for row in self.rows if row.layout is not None)
        return cut / max(sum(row.numel for row in self.rows), 1)

    def __str__(self) -> str:
        total = format_count(sum(row.numel for row in self.rows))
        sequence = ", sequences are cut" if self.sequence else ""
        lines = [f"tensor axis  {self.size} ranks, {self.share:.1%} of {total} parameters are cut{sequence}"]
        lines += [f"  {line}" for line in _traffic_lines(self.traffic)]
        later = [row for row in self.rows if row.name in self.partial]
        if later:
            sizes = f"{counted(len(later), 'parameter')}, {format_count(sum(row.numel for row in later))} elements"
            lines.append(f"  one all-reduce for each optimizer step: gradients of {sizes}")
        told = [row for row in self.rows if row.layout is not None or row.reason]
        lines += _table([*_folded(told), *_region_rows(self.regions)])
        others = len(self.rows) - len(told)
        return "\n".join(lines + ([f"  {counted(others, 'other')} replicated"] if others else []))


def plan_tensor(
    parameters: ParameterTable,
    traced: Traced,
    *,
    overrides: Overrides | None = None,
    regions: RegionPlan | None = None,
    hinted: Iterable[str] = (),
    sequence: bool = False,
    useful: Callable[[int], bool] | None = None,
) -> TensorPlan:
    """Returns the plan that a trace leads to.

    Args:
        parameters: The module's parameters.
        traced: What the trace has found, with these overrides and regions.
        overrides: What the user decided.
        regions: Modules that run on local weights, and why others do not.
        hinted: Modules that the model's own plan names as regions.
        sequence: Sequence parallelism.
        useful: Whether anything could be cut at another degree, for an error.

    Raises:
        PlanError: Nothing can be cut, or a weight is to be cut that is used in no way that knows how.
    """
    overrides, regions = overrides or Overrides(), regions or RegionPlan()
    local = {name: (region.module, layout) for region in regions.regions for name, layout in region.layouts.items()}
    hints = frozenset(hinted)
    rows = []
    for info in parameters.rows:
        if info.name in local:
            module, layout = local[info.name]
            source: Source = "plan" if module in overrides.regions else "hint" if module in hints else "trace"
            rows.append(ParameterStyle(name=info.name, style="local", layout=layout, shape=info.shape, source=source))
        else:
            rows.append(_row(info, traced, overrides.styles.get(info.name), regions))
    plan = TensorPlan(
        size=traced.size,
        rows=tuple(rows),
        traffic=traced.traffic,
        regions=regions.regions,
        partial=traced.partial,
        sequence=sequence,
    )
    if not plan.layouts:
        raise _nothing_cut(plan, useful)
    return plan


def _row(info: ParameterInfo, traced: Traced, wish: ForcedStyle | None, regions: RegionPlan) -> ParameterStyle:
    rejected = traced.rejected.get(info.name)
    found = traced.styles.get(info.name) if rejected is None else None
    source: Source = "trace" if wish is None else "plan"
    if found is not None:
        style = cast("Style", found[0])
        return ParameterStyle(name=info.name, style=style, layout=found[1], shape=info.shape, source=source)
    if wish is not None and wish.kind != "replicate":
        raise wish.refused(info.name, "the step uses it in no linear layer, embedding or attention")
    reason = rejected or _why_unseen(info, regions)
    return ParameterStyle(
        name=info.name, style="replicate", layout=None, shape=info.shape, reason=reason, source=source
    )


def _why_unseen(info: ParameterInfo, regions: RegionPlan) -> str:
    for module, reason in regions.refused.items():
        if info.name.startswith(f"{module}."):
            return f"{module} is no local region: {reason}"
    if any(info.name.startswith(f"{region.module}.") for region in regions.regions):
        return "whole in its local region"
    return "" if len(info.shape) < 2 else "no linear layer, embedding or attention uses it as a weight"


def _nothing_cut(plan: TensorPlan, useful: Callable[[int], bool] | None) -> PlanError:
    reasons = list(dict.fromkeys(_numberless_text(f"{row.name}: {row.reason}") for row in plan.rows if row.reason))
    found = [degree for degree in _DEGREES if degree != plan.size and useful is not None and useful(degree)]
    shown = "".join(f"\n    {reason}" for reason in reasons[:5])
    return PlanError(
        f"tensor_parallel_size={plan.size}: no parameter of the model can be cut.{shown}",
        valid=f"tensor_parallel_size of {', '.join(map(str, (1, *found)))}",
        fix=f"tensor_parallel_size={found[0] if found else 1}",
    )


# ---- as text ----


def _numberless_text(text: str) -> str:
    """Puts ``*`` for the numbers in the names that a text has."""
    return _NUMBER.sub("*", text)


def _traffic_lines(traffic: Mapping[str, Collectives]) -> Iterator[str]:
    counts: dict[tuple[str, str], list[str]] = {}
    for block, each in traffic.items():
        counts.setdefault((numberless(block), str(each)), []).append(block)
    for (pattern, text), blocks in counts.items():
        name = "outside of blocks" if blocks == [""] else blocks[0] if len(blocks) == 1 else pattern
        yield f"{name}{_times(len(blocks))}: {text}"


def _folded(rows: Sequence[ParameterStyle]) -> Iterator[tuple[str, ...]]:
    """Lines of a table; parameters whose names differ in numbers only are one."""
    kinds: dict[tuple[str, ...], list[ParameterStyle]] = {}
    for row in rows:
        reason = _numberless_text(row.reason)
        key = (numberless(row.name), row.style, str(row.layout), str(row.shape), reason, row.source)
        kinds.setdefault(key, []).append(row)
    for (pattern, *_, reason, source), alike in kinds.items():
        row = alike[0]
        name = pattern if len(alike) > 1 else row.name
        layout = "" if row.layout is None else str(row.layout)
        by = "" if source == "trace" else f"[{source}]"
        text = reason if len(alike) > 1 else row.reason
        yield f"{name}{_times(len(alike))}", row.style, layout, "x".join(map(str, row.shape)), f"{by} {text}".strip()


def _region_rows(regions: Sequence[Region]) -> Iterator[tuple[str, ...]]:
    counts: dict[str, list[Region]] = {}
    for region in regions:
        counts.setdefault(numberless(region.module), []).append(region)
    for pattern, alike in counts.items():
        error = max(region.error for region in alike)
        name = pattern if len(alike) > 1 else alike[0].module
        yield f"{name}{_times(len(alike))}", "region", "", "", f"local weights, proved to {error:.0e}"


def _times(count: int) -> str:
    return f" x {count}" if count > 1 else ""


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(4)] if rows else []
    return [
        "  " + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    ]
