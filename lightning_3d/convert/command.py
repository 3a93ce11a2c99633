"""``lightning-3d convert``: a checkpoint in another form, in one process and without a network."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Sequence
from pathlib import Path

from lightning_3d.convert.wish import FORMS, SIZE, Wish, place_for

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD
_LARGE = 2**20


def run(arguments: Sequence[str]) -> int:
    """Converts, prints what was written, and returns the exit code.

    Args:
        arguments: The words after the verb.

    Raises:
        CheckpointError: The checkpoint cannot be read, or the other form cannot be written.
        ConfigError: An option has an impossible value.
    """
    options = _parser().parse_args(list(arguments))
    wish = Wish(form=options.to, prefix=options.prefix, size=options.max_shard_size, weights_only=options.weights_only)
    place_for(Path(options.out))
    # What is misspelt should not wait for torch to be imported.
    from lightning_3d.convert.conversion import convert
    from lightning_3d.convert.progress import Progress

    _give_memory_back()
    progress = Progress()
    try:
        lines = convert(Path(options.checkpoint), Path(options.out), wish, progress)
    finally:
        progress.end()
    print("\n".join(lines))
    return 0


def _give_memory_back() -> None:
    """Has glibc return the memory of each large tensor when it is freed, where small ones would pin it otherwise."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_MMAP_THRESHOLD, _LARGE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-3d convert", description="Writes a checkpoint in another form, in one process."
    )
    parser.add_argument("checkpoint", help="of lightning_3d, of Lightning, or safetensors")
    parser.add_argument("out", help="where to; nothing may be there")
    parser.add_argument(
        "--to",
        required=True,
        choices=FORMS,
        help="one file that plain Lightning resumes; weights for Hugging Face; a directory for any mesh",
    )
    parser.add_argument(
        "--prefix", help="to safetensors: taken off the names (found if left out); from safetensors: put before them"
    )
    parser.add_argument("--max-shard-size", default=SIZE, help="largest file of safetensors (%(default)s)")
    parser.add_argument("--weights-only", action="store_true", help="leave the optimizers out")
    return parser
