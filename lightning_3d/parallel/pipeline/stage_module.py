"""What one stage owns, as a module: torch's schedules run it, and the data axis shards it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

from torch import Tensor, nn

# Runs the user's step on a stage: number of the stage, what it was sent, number of the micro-batch.
RunStage = Callable[[int, tuple[Tensor, ...], int], Any]


class StageModule(nn.Module):
    """Registers exactly what a stage owns.

    Args:
        stage: Number of the stage.
        parts: Modules that the stage calls.
        holders: Modules that only hold parameters which the stage uses, and the names that these have there.
    """

    def __init__(
        self, stage: int, parts: Sequence[nn.Module], holders: Sequence[tuple[nn.Module, frozenset[str]]]
    ) -> None:
        super().__init__()
        self.stage = stage
        self.parts = nn.ModuleList(parts)
        self.holders = nn.ModuleList(Holder(module, names) for module, names in holders)
        self._run: RunStage | None = None

    def connect(self, run: RunStage) -> None:
        """Says what a call of the stage runs."""
        self._run = run

    def forward(self, *received: Tensor, mb: int) -> Any:
        """Runs the stage on a micro-batch.

        Args:
            received: What the stage before sent.
            mb: Number of the micro-batch.
        """
        assert self._run is not None, "connect() comes first"
        return self._run(self.stage, received, mb)


class Holder(nn.Module):
    """Shows some of the parameters that another module has, and hands on what is put in their place.

    The module itself may have other parameters, that live on another rank.

    Args:
        module: The module that has them.
        names: Names of the parameters there.
    """

    def __init__(self, module: nn.Module, names: frozenset[str]) -> None:
        super().__init__()
        self._parameters = Entries(module._parameters, names)  # type: ignore[assignment]

    def forward(self) -> None:
        """Nothing calls it."""
        raise AssertionError("a holder computes nothing")


class Entries(MutableMapping[str, Any]):
    """Some entries of a dict, live in both directions.

    Args:
        entries: The dict.
        names: Keys that are shown.
    """

    def __init__(self, entries: dict[str, Any], names: frozenset[str]) -> None:
        self._entries = entries
        self._names = names

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._entries if name in self._names)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return self._entries[name]

    def __setitem__(self, name: str, value: Any) -> None:
        assert name in self._names, f"{name} is not shown here"
        self._entries[name] = value

    def __delitem__(self, name: str) -> None:
        if name not in self._names:
            raise KeyError(name)
        del self._entries[name]
