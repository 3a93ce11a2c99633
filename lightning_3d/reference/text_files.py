"""From text files to one memory-mapped file of token ids, written once and shared by all processes."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from filelock import FileLock, Timeout

FORMAT = 1
PIECE_BYTES = 1 << 20
LOCK_SECONDS = 3600.0

_NOT_CORPUS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

logger = logging.getLogger(__name__)


class Tokenizer(Protocol):
    """What makes token ids of text."""

    @property
    def fingerprint(self) -> str:
        """Text that differs between tokenizers that give different ids."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def end_of_text(self) -> int:
        """The id that ends each file."""

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        """Returns the ids of a piece of text, which ends with a line or the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFiles:
    """The text files of a corpus, in order.

    Attributes:
        paths: Absolute paths.
        max_bytes: Bytes to read over all files; None for all.
    """

    paths: tuple[str, ...]
    max_bytes: int | None = None

    def pieces(self) -> Iterator[Iterator[bytes]]:
        """Yields each file as an iterator of pieces of whole lines, until ``max_bytes`` is reached."""
        left = self.num_bytes if self.max_bytes is None else self.max_bytes
        for path in self.paths:
            if left <= 0:
                return
            yield _read(path, left)
            left -= os.path.getsize(path)

    @property
    def num_bytes(self) -> int:
        """Size of all files together."""
        return sum(os.path.getsize(path) for path in self.paths)

    def key(self, tokenizer: Tokenizer) -> str:
        """Returns the name under which these files' tokens are kept; another edit, cap or tokenizer is another name."""
        parts = [f"format {FORMAT}", tokenizer.fingerprint, f"max_bytes {self.max_bytes}"]
        for path in self.paths:
            status = os.stat(path)
            parts.append(f"{path} {status.st_size} {status.st_mtime_ns}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def find_text(files: Sequence[str] | None, max_bytes: int | None) -> TextFiles:
    """Resolves the files of a corpus and checks that there is text in them.

    Args:
        files: Paths and globs (``**`` descends); None for the Python sources of the standard library.
        max_bytes: Bytes to read over all files; None for all.

    Returns:
        The files, each once; those of a glob are sorted.

    Raises:
        FileNotFoundError: If a path or glob matches no file.
        ValueError: If the files hold no byte, or ``max_bytes`` is below 1.
    """
    if max_bytes is not None and max_bytes < 1:
        raise ValueError(f"max_bytes={max_bytes} leaves no text\n  valid: at least 1, or null for all")
    paths = _standard_library() if files is None else [path for pattern in files for path in _matches(pattern)]
    text = TextFiles(paths=tuple(dict.fromkeys(paths)), max_bytes=max_bytes)
    if not text.num_bytes:
        raise ValueError(
            f"the corpus is empty: {len(text.paths)} file(s) of 0 bytes from files={files}\n"
            "  fix: name files with text in them, or files=null for the sources of Python's standard library"
        )
    return text


def default_cache_dir() -> Path:
    """Returns the user's cache directory for token files."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "lightning_3d" / "tokens"


def tokenize_once(text: TextFiles, tokenizer: Tokenizer, cache_dir: Path) -> Path:
    """Returns the token file of a corpus, which it writes if no process has done so before.

    Any number of processes may call this at once. One writes under a name of its own, which then takes the final
    name in one move, so that no reader ever sees half a file; the lock only spares the others the work. The system
    frees the lock of a process that dies.

    Args:
        text: The corpus.
        tokenizer: What makes ids of it.
        cache_dir: Where token files are kept; made if missing.

    Returns:
        Path of a raw file of ids in :func:`token_dtype`, each text file ended by ``tokenizer.end_of_text``.

    Raises:
        OSError: If ``cache_dir`` cannot be written, or a file of the corpus cannot be read.
        TimeoutError: If another process holds the lock for too long.
    """
    path = cache_dir / f"{text.key(tokenizer)}.tokens"
    if path.exists():
        return path
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
            if not path.exists():
                _write(path, _ids(text, tokenizer), token_dtype(tokenizer.vocab_size))
                logger.info("tokenized %d files into %s", len(text.paths), path)
    except Timeout as error:
        raise TimeoutError(
            f"another process has held {error.lock_file} for {LOCK_SECONDS:.0f} s\n"
            "  fix: end it, or choose another cache_dir"
        ) from error
    except PermissionError as error:
        if error.filename in text.paths:
            raise
        raise PermissionError(
            f"cannot write token files to {cache_dir}: {error.strerror}\n  fix: cache_dir=<a writable directory>"
        ) from error
    return path


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger]:
    """Returns the type in which a token file keeps its ids: the smallest that holds them all."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def open_tokens(path: Path, vocab_size: int) -> npt.NDArray[np.unsignedinteger]:
    """Maps a token file into memory, read-only."""
    return np.memmap(path, dtype=token_dtype(vocab_size), mode="r")


def _standard_library() -> list[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [str(p) for p in root.rglob("*.py") if _NOT_CORPUS.isdisjoint(p.relative_to(root).parts)]
    if not paths:
        raise FileNotFoundError(
            f"this Python keeps no *.py files under {root}, the default corpus\n  fix: files=[<path or glob>, ...]"
        )
    return sorted(paths)


def _matches(pattern: str) -> list[str]:
    expanded = os.path.expanduser(pattern)
    # A file whose name happens to hold a bracket is itself, not a glob.
    found = [expanded] if os.path.isfile(expanded) else glob.glob(expanded, recursive=True)
    files = sorted(os.path.abspath(path) for path in found if os.path.isfile(path))
    if not files:
        raise FileNotFoundError(
            f"no file matches {pattern!r}, looked up from {os.getcwd()}\n"
            "  fix: an absolute path or glob, or one relative to that directory"
        )
    return files


def _read(path: str, limit: int) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while limit > 0 and (lines := file.readlines(PIECE_BYTES)):
            piece = b"".join(lines)[:limit]
            yield piece
            limit -= len(piece)


def _ids(text: TextFiles, tokenizer: Tokenizer) -> Iterator[npt.NDArray[np.integer]]:
    end = np.array([tokenizer.end_of_text])
    for pieces in text.pieces():
        yield from map(tokenizer.encode, pieces)
        yield end


def _write(path: Path, ids: Iterable[npt.NDArray[np.integer]], dtype: np.dtype[np.unsignedinteger]) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
    try:
        with open(unfinished, "wb") as file:
            for piece in ids:
                piece.astype(dtype).tofile(file)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
