"""Which pipeline rank has what: the parameters that it holds, and the modules whose other state is right on it.

On a pipeline axis a rank holds the parameters of its own stages. All others are absent: parameters on the meta device
in their places. Buffers are everywhere, but only a rank that calls a module has the present values of its buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Presence:
    """What the ranks of one pipeline have.

    Attributes:
        group: The ranks, in the order of the axis.
        rank: This rank's place among them.
        device: Where tensors must lie to be sent over the group.
        holders: The ranks that hold each parameter, by first names.
        modules: The rank that has the present buffers of each of these modules and what is in them.
        others: The rank that has the present buffers of all other modules.
    """

    group: dist.ProcessGroup
    rank: int
    device: torch.device
    holders: Mapping[str, tuple[int, ...]]
    modules: Mapping[str, int]
    others: int

    @property
    def absent(self) -> frozenset[str]:
        """First names of the parameters that this rank does not hold."""
        return frozenset(name for name, ranks in self.holders.items() if self.rank not in ranks)

    def source(self, name: str) -> int:
        """Returns the rank that has the present value of a buffer, or of other state that is no parameter.

        Args:
            name: Its name in the state dict.
        """
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1))
        return next((self.modules[prefix] for prefix in prefixes if prefix in self.modules), self.others)
