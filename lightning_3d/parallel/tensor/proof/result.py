"""What became of a proof."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_3d.units import counted, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A step on tensor ranks gave what one device gives.

    Attributes:
        ranks: Number of ranks.
        value_error: Relative error of what the step returned and logged.
        parameter: The parameter whose gradient has the largest error; None if the step has no gradients.
        error: That error.
        parameters: How many gradients were compared.
        precision: What it was computed in.
        piece: How much of the model and of the batch it was made on.
        seconds: What it took.
        cached: It was made before and found again.
    """

    ranks: int
    value_error: float
    parameter: str | None
    error: float
    parameters: int
    precision: str
    piece: str
    seconds: float
    cached: bool = False

    def __str__(self) -> str:
        worst = (
            f", {counted(self.parameters, 'gradient')} {self.error:.0e} (largest: {self.parameter})"
            if self.parameter
            else ""
        )
        when = "earlier" if self.cached else f"in {format_seconds(self.seconds)}"
        return (
            f"proved on {self.ranks} ranks ({self.piece}, {self.precision}) {when}: relative errors: loss "
            f"{self.value_error:.0e}{worst}"
        )


@dataclass(frozen=True, slots=True)
class Skipped:
    """There is no proof.

    Attributes:
        reason: Why not.
    """

    reason: str

    def __str__(self) -> str:
        return f"not proved: {self.reason}"
