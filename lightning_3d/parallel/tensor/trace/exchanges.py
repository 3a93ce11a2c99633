"""What a traced step communicates."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanges:
    """Collectives of one direction.

    Attributes:
        sums: All-reduces.
        scatters: Reduce-scatters.
        gathers: All-gathers.
    """

    sums: int = 0
    scatters: int = 0
    gathers: int = 0

    def __add__(self, other: Exchanges) -> Exchanges:
        return Exchanges(
            sums=self.sums + other.sums, scatters=self.scatters + other.scatters, gathers=self.gathers + other.gathers
        )

    def __sub__(self, other: Exchanges) -> Exchanges:
        return self + Exchanges(sums=-other.sums, scatters=-other.scatters, gathers=-other.gathers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collectives:
    """Collectives over the tensor axis in one micro-batch.

    Attributes:
        forward: All-reduces of the forward pass.
        backward: Those of the backward pass, sums of weights' gradients left out.
        scatters: Reduce-scatters, forward and backward.
        gathers: All-gathers, forward and backward.
    """

    forward: int = 0
    backward: int = 0
    scatters: tuple[int, int] = (0, 0)
    gathers: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, forward: Exchanges, backward: Exchanges) -> Collectives:
        """Returns both directions together."""
        return cls(
            forward=forward.sums,
            backward=backward.sums,
            scatters=(forward.scatters, backward.scatters),
            gathers=(forward.gathers, backward.gathers),
        )

    def __add__(self, other: Collectives) -> Collectives:
        return Collectives(
            forward=self.forward + other.forward,
            backward=self.backward + other.backward,
            scatters=(self.scatters[0] + other.scatters[0], self.scatters[1] + other.scatters[1]),
            gathers=(self.gathers[0] + other.gathers[0], self.gathers[1] + other.gathers[1]),
        )

    def __str__(self) -> str:
        kinds = {
            "all-reduces": (self.forward, self.backward),
            "reduce-scatters": self.scatters,
            "all-gathers": self.gathers,
        }
        told = [f"{name} {each[0]} forward + {each[1]} backward" for name, each in kinds.items() if any(each)]
        return ", ".join(told) or "nothing"
