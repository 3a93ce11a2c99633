"""The constants of the time model: fitted once on published tables, by ``python -m tests.unit.planner.fit``.

None of them is a free parameter of a cluster or a model. Change one only together with the table of errors in
docs/planner.md, which the same script prints.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Constants:
    """What the formulas leave open.

    Attributes:
        half_width: Columns on a rank at which matrix products reach half of their speed, on an A100.
        half_rows: Rows of a micro-batch at which they do.
        memory_passes: How often a forward moves its kept activations through the device's memory.
        attention_slowdown: Time of fused attention over that of a matrix product of as many operations.
        odd_heads: The same for unfused attention whose heads have a size that 8 does not divide.
        inner_share: Share of its bandwidth that the innermost level gives to a collective.
        outer_share: The same of the levels above.
        pair_bandwidth: Most bytes per second that one device sends to another, where the link has more.
        members_power: How far several devices of a node add up for one group: their number to this power.
        exposed: Share of communication beside computation that costs time all the same.
        block_seconds: Of starting what a block does, forward or backward.
        step_seconds: Of what a step does once.
        collective_seconds: Of starting a collective.
        float8_speed: Of 8-bit products over 16-bit ones.
        optimizer_bytes: Bytes that the optimizer moves for each parameter.
        needed_share: Bytes a device needs for each byte that the formulas allocate: fragmentation, workspaces.
        needed_constant: Bytes that it needs in any case: the driver's context, buffers of collectives.
    """

    half_width: float = 113.0
    half_rows: float = 167.0
    memory_passes: float = 2.84
    attention_slowdown: float = 2.69
    odd_heads: float = 25.3
    inner_share: float = 0.77
    outer_share: float = 0.69
    pair_bandwidth: float = 48e9
    members_power: float = 0.789
    exposed: float = 0.278
    block_seconds: float = 57.3e-6
    step_seconds: float = 30.5e-3
    collective_seconds: float = 15e-6
    float8_speed: float = 2.0
    optimizer_bytes: float = 30.0
    needed_share: float = 1.07
    needed_constant: float = 6.0e9


FITTED = Constants()
# Operations per byte of memory of an A100: how much wider products must be elsewhere to reach the same share.
A100_BALANCE = 312e12 / 1.94e12
