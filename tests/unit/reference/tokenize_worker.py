"""One of several processes that tokenize the same text at once: argv = source file, text, cache, moment to begin."""

from __future__ import annotations

import importlib.util
import sys
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt


class SlowBytes:
    fingerprint = "slow bytes"
    vocab_size = 257
    end_of_text = 256

    def __init__(self, log: Path) -> None:
        self.log = log

    def encode(self, text: bytes) -> npt.NDArray[np.integer]:
        with self.log.open("a") as file:
            file.write("encoded\n")
        time.sleep(0.3)
        return np.frombuffer(text, dtype=np.uint8)


def main(source: str, text: str, cache: str, moment: str) -> None:
    # Alone, by its path: the package would bring torch, and the race would be over before this process joined it.
    spec = importlib.util.spec_from_file_location("text_files", source)
    assert spec is not None
    assert spec.loader is not None
    text_files = importlib.util.module_from_spec(spec)
    sys.modules["text_files"] = text_files
    spec.loader.exec_module(text_files)
    while time.time() < float(moment):
        time.sleep(0.001)
    tokenizer = SlowBytes(Path(text).with_name("log"))
    path = text_files.tokenize_once(text_files.find_text([text], None), tokenizer, Path(cache))
    print(len(text_files.open_tokens(path, 257)), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
