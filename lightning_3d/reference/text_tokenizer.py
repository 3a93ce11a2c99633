"""Tokenizers: the bytes of the text, or one from Hugging Face."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_3d.reference.text_files import Tokenizer

BYTES = "bytes"


def load_tokenizer(name: str) -> Tokenizer:
    """Returns a tokenizer by name.

    Args:
        name: "bytes", or the name or directory of a Hugging Face tokenizer.

    Raises:
        ImportError: If the ``hf`` extra is needed and missing.
        ValueError: If the tokenizer cannot be loaded, or has no token that ends a text.
    """
    return ByteTokenizer() if name == BYTES else HFTokenizer(name)


class ByteTokenizer:
    """Each byte is a token; id 256 ends a text."""

    fingerprint = BYTES
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        """Returns the bytes themselves."""
        return np.frombuffer(text, dtype=np.uint8)


class HFTokenizer:
    """A tokenizer of Hugging Face transformers, without special tokens inside the text.

    Args:
        name: Name on the hub, or a local directory.
    """

    def __init__(self, name: str) -> None:
        self._tokenizer = _from_pretrained(name)
        end = self._tokenizer.eos_token_id
        if end is None:
            raise ValueError(f"tokenizer {name!r} has no end-of-text token\n  fix: set its eos_token")
        self.end_of_text = int(end)
        self.vocab_size = len(self._tokenizer)
        self.fingerprint = _fingerprint(self._tokenizer)

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        """Returns the ids of UTF-8 text; bytes that are not UTF-8 become replacement characters."""
        decoded = text.decode("utf-8", errors="replace")
        ids = self._tokenizer(decoded, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64)


def _from_pretrained(name: str) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(
            f"tokenizer {name!r} needs transformers, which is not installed\n"
            f"  fix: pip install 'lightning-3d[hf]', or tokenizer={BYTES}"
        ) from error
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"no tokenizer {name!r}: {error}\n"
            f"  valid: {BYTES}, the name of a Hugging Face tokenizer, or a directory with one\n"
            f"  fix: data.tokenizer={BYTES}, or data.tokenizer=DIRECTORY where the hub is not reached"
        ) from error


def _fingerprint(tokenizer: Any) -> str:
    rules = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else repr(sorted(tokenizer.get_vocab().items()))
    return f"{type(tokenizer).__name__} {hashlib.sha256(rules.encode()).hexdigest()}"
