"""Values that ranks give names: reduced in one collective where all have the same names, and by name where not.

Lightning reduces a logged value where it is logged. Ranks that log other names, or in another order, then wait for each
other or mix their values. Here a rank says which names it has, and nobody waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.checkpoint.agreement import gather
from lightning_3d.strategy.faults.signals import SignalsOfAll

# Numbers that travel with the names; more of them need a second collective.
_INLINE = 58
# A hash of the names in two parts, so small that the sum of their squares over 2^17 ranks is exact in fp64.
_PARTS, _BITS = 2, 18


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank has of a named value.

    Attributes:
        kind: "mean", "sum", "max" or "min"; with any other kind only the name is exchanged.
        total: The value; for a mean, times its weight.
        weight: What this rank counts in a mean, and whether it counts elsewhere.
    """

    kind: str
    total: Tensor
    weight: Tensor

    @classmethod
    def of(cls, kind: str, value: Any, weight: float = 1.0) -> Share:
        """Returns the share of a value; one of weight 0 may be anything, and does not count."""
        wide = torch.as_tensor(value).detach().to(torch.float64).reshape(())
        if kind == "mean":
            wide = wide * weight if weight else torch.zeros_like(wide)
        return cls(kind=kind, total=wide, weight=wide.new_tensor(weight))

    @property
    def sums(self) -> list[Tensor]:
        """What is added up over the ranks."""
        if self.kind == "mean":
            return [self.total, self.weight]
        return [torch.where(self.weight > 0, self.total, 0.0)] if self.kind == "sum" else []

    @property
    def extremes(self) -> list[Tensor]:
        """What the ranks take the largest of."""
        if self.kind not in ("max", "min"):
            return []
        return [torch.where(self.weight > 0, self.total if self.kind == "max" else -self.total, -torch.inf)]

    def reduced(self, sums: Iterator[Tensor], extremes: Iterator[Tensor], copies: int) -> Tensor:
        """Returns the value of all ranks.

        Args:
            sums: Gives what `sums` became.
            extremes: Gives what `extremes` became.
            copies: Ranks that have the same share.
        """
        if self.kind == "mean":
            return next(sums) / next(sums)
        if self.kind == "sum":
            return next(sums) / copies
        if self.kind == "max":
            return next(extremes)
        return -next(extremes) if self.kind == "min" else self.total


@dataclass(frozen=True, slots=True)
class Reduced:
    """A value of all ranks.

    Attributes:
        kind: That of its shares.
        value: The value, in fp64.
        about: What a rank that has the name says of it, for one that has not; None where all have the same names.
    """

    kind: str
    value: Tensor
    about: Any = None


class NamedValues:
    """Reduces named values over all ranks.

    Attributes:
        signals: What signals have asked of any rank.

    Args:
        group: All ranks.
        device: Where tensors must lie to be reduced.
        data_rank: This rank's position on the data axis: ranks of one position have the same values, counted once.
        data_size: Positions of the data axis.
        signals: Travel with the values.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        data_rank: int,
        data_size: int,
        signals: SignalsOfAll | None = None,
    ) -> None:
        self._group = group
        self._device = device
        self._data_rank = data_rank
        self._copies = group.size() // data_size
        self.signals = signals or SignalsOfAll()

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self._group.size() == 1

    @property
    def differ(self) -> bool:
        """Whether any ranks see different samples."""
        return self._copies < self._group.size()

    def reduce(self, shares: Mapping[str, Share], about: Callable[[str], Any]) -> dict[str, Reduced]:
        """Returns the values of all names that any rank has, in one order on all ranks. A collective.

        Args:
            shares: What this rank has.
            about: Returns what others need to know of a name, picklable.
        """
        given = list(shares.values())
        sums = self._flat([part for share in given for part in share.sums])
        names = [_hashed(shares, part) for part in range(_PARTS)]
        hashes = [number for name in names for number in (name, name * name)]
        header = [*self.signals.tell(), *hashes]
        buffer = torch.zeros(len(header) + _INLINE, dtype=torch.float64, device=self._device)
        buffer[: len(header)] = torch.tensor(header, dtype=torch.float64)
        inline = len(sums) <= _INLINE
        if inline:
            buffer[len(header) : len(header) + len(sums)] = sums
        dist.all_reduce(buffer, group=self._group)
        found = [*map(int, buffer[: len(header)].tolist())]
        self.signals.learn(found[: -len(hashes)])
        if not self._alike(found[-len(hashes) :]):
            return self._by_name(shares, about)
        if inline:
            sums = buffer[len(header) :]
        else:
            dist.all_reduce(sums, group=self._group)
        extremes = self._flat([part for share in given for part in share.extremes])
        if len(extremes):
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._group)
        parts = iter(sums), iter(extremes), self._copies
        return {name: Reduced(share.kind, share.reduced(*parts)) for name, share in shares.items()}

    def _flat(self, parts: Sequence[Tensor]) -> Tensor:
        if not parts:
            return torch.zeros(0, dtype=torch.float64, device=self._device)
        return torch.stack([part.to(self._device) for part in parts])

    def _alike(self, header: Sequence[int]) -> bool:
        """Whether the hashes of all ranks are one: then, and only then, their squares spread by nothing."""
        pairs = zip(header[::2], header[1::2], strict=True)
        return all(total * total == squares * self._group.size() for total, squares in pairs)

    def _by_name(self, shares: Mapping[str, Share], about: Callable[[str], Any]) -> dict[str, Reduced]:
        mine = {
            name: (replace(share, total=share.total.cpu(), weight=share.weight.cpu()), about(name))
            for name, share in shares.items()
        }
        held: dict[str, dict[int, tuple[Share, Any]]] = {}
        for data_rank, theirs in gather(self._group, (self._data_rank, mine)):
            for name, told in theirs.items():
                held.setdefault(name, {}).setdefault(data_rank, told)
        return {name: _joined(list(found.values())) for name, found in held.items()}


def _joined(told: Sequence[tuple[Share, Any]]) -> Reduced:
    """The value of several shares, or the first of them if none counts."""
    shares = [share for share, _ in told]
    first, about = told[0]
    if not any(share.weight for share in shares):
        return Reduced(first.kind, first.total, about)
    sums = [torch.stack(parts).sum() for parts in zip(*(share.sums for share in shares), strict=True)]
    extremes = [torch.stack(parts).max() for parts in zip(*(share.extremes for share in shares), strict=True)]
    return Reduced(first.kind, first.reduced(iter(sums), iter(extremes), 1), about)


def _hashed(shares: Mapping[str, Share], part: int) -> int:
    names = repr([(name, share.kind) for name, share in shares.items()])
    digest: bytes = hashlib.blake2b(names.encode(), digest_size=8 * _PARTS).digest()
    return int.from_bytes(digest[8 * part : 8 * (part + 1)], "big") % (1 << _BITS)
