"""``pretrained=``: weights are read into the parts of a module that has just been cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.agreement import gather
from lightning_3d.checkpoint.pretrained import load_pretrained
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.log import told_if_slow
from lightning_3d.strategy.life import AppliedModule

_Pairs = Sequence[tuple[Tensor, Tensor]]


def read_pretrained(applied: AppliedModule, config: StrategyConfig, group: dist.ProcessGroup) -> None:
    """Reads ``pretrained`` into a module that nothing has been loaded into yet. Every rank calls it.

    Copies that callbacks have made of the module before it was cut (averages of its weights) begin where it does.

    Args:
        applied: The module as this rank holds it.
        config: The strategy's options; nothing happens without ``pretrained``.
        group: All ranks.

    Raises:
        CheckpointError: On every rank: the weights cannot be read, or are of another model.
    """
    if config.pretrained is None:
        return
    applied.engine.rest()
    copies = [pairs for pairs in applied.copies.pairs() if _are_equal(pairs, group)]
    with told_if_slow(f"reading {config.pretrained}", rank_zero_info):
        report = load_pretrained(
            applied.module,
            Path(config.pretrained).expanduser().absolute(),
            strict=config.pretrained_strict,
            group=group if group.size() > 1 else None,
            layouts=applied.layouts,
        )
    with torch.no_grad():
        for pairs in copies:
            for copied, original in pairs:
                _local(copied).copy_(_local(original))
    rank_zero_info("pretrained: %s", report)
    if report.unmatched:
        rank_zero_warn(f"pretrained: {report.unmatched}")


def _are_equal(pairs: _Pairs, group: dist.ProcessGroup) -> bool:
    here = all(one.is_meta or torch.equal(_local(one), _local(other)) for one, other in pairs)
    return all(gather(group if group.size() > 1 else None, here))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
