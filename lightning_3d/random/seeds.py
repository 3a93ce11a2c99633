"""Seeds: one pure function from a base seed and names to 64 bits, the same on every machine and in every process."""

from __future__ import annotations

import hashlib


def derive_seed(base: int, *parts: int | str) -> int:
    """Derives a seed from a base seed and the names of what it is for.

    The seed is the BLAKE2b digest of the written tuple ``(base, *parts)``. Unlike :func:`hash` it does not change
    between processes, versions or machines, and unlike ``base + rank`` it cannot collide by arithmetic:
    ``("a", 12)`` and ``("a1", 2)`` are different texts.

    Torch's CPU generator uses the low 32 bits of a seed, its CUDA generator all 64.

    Args:
        base: The run's seed, or an earlier derived seed.
        parts: Names and numbers that say what the seed is for, such as a module's name or a step.

    Returns:
        An integer in [0, 2**64), accepted by ``torch.Generator.manual_seed``.
    """
    # ascii(), not str(): quotes and escapes make the text unique to the tuple, whatever characters a name has.
    text = ascii((base, *parts)).encode("ascii")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
