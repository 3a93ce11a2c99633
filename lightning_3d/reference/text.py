"""Text as training data: windows of tokens from the user's files, or from those every machine has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loops.progress import _ProcessedTracker
from torch import Tensor
from torch.utils.data import Dataset

from lightning_3d.reference.position import Position, Progress
from lightning_3d.reference.sampler import GlobalOrderSampler, ResumableLoader
from lightning_3d.reference.text_files import default_cache_dir, find_text, open_tokens, tokenize_once
from lightning_3d.reference.text_tokenizer import BYTES, load_tokenizer

STATE_FORMAT = 1


class TokenWindows(Dataset[Tensor]):
    """Neighbouring windows of a token file that do not overlap.

    Args:
        path: A token file.
        vocab_size: Number of token ids, which tells the file's type.
        width: Tokens per window.
        first: Window of the file that is sample 0.
        count: Number of samples.
    """

    def __init__(self, path: Path, *, vocab_size: int, width: int, first: int, count: int) -> None:
        self.path, self.vocab_size, self.width, self.first, self.count = path, vocab_size, width, first, count
        self._tokens = open_tokens(path, vocab_size)

    def __getstate__(self) -> dict[str, Any]:
        # A worker process maps the file anew: pickling the map would copy all of the text.
        return {name: value for name, value in vars(self).items() if name != "_tokens"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._tokens = open_tokens(self.path, self.vocab_size)

    def __len__(self) -> int:
        """Returns the number of windows."""
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        """Returns a window as [width] int64 token ids."""
        begin = (self.first + range(self.count)[index]) * self.width
        return torch.from_numpy(self._tokens[begin : begin + self.width].astype(np.int64))


class TextDataModule(L.LightningDataModule):
    """Batches of [batch_size, length + 1] token ids from text files.

    The text is tokenized once, into a memory-mapped file that all processes and later runs share. The first windows
    are for training, the next for validation, the last for testing. A checkpoint holds the position in the data, so
    that a resumed run reads exactly what an uninterrupted one would have read, also on another number of data ranks
    if ``batch_size`` × data ranks stays.

    Args:
        files: Paths and globs of text files; None for the Python sources of the standard library.
        tokenizer: "bytes", or the name or directory of a Hugging Face tokenizer (extra ``hf``).
        length: Tokens per sequence. A window has one more: the target of the last.
        batch_size: Sequences per batch and data rank.
        val_fraction: Share of the windows for validation.
        test_fraction: Share of the windows for testing.
        max_bytes: Bytes to read of the files; None for all.
        seed: Chooses the order of the training windows in each epoch.
        num_workers: Processes that read ahead; 0 reads in the training process.
        cache_dir: Where token files are kept; None for the user's cache directory.

    Raises:
        FileNotFoundError: If a path or glob matches no file.
        ValueError: If an argument is out of its range, or there is no text.
    """

    def __init__(
        self,
        files: Iterable[str] | str | None = None,
        tokenizer: str = BYTES,
        length: int = 256,
        batch_size: int = 8,
        val_fraction: float = 0.05,
        test_fraction: float = 0.05,
        max_bytes: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        _check(length, batch_size, val_fraction, test_fraction, seed, num_workers)
        # Containers of Hydra become plain ones before they are saved with a checkpoint.
        files = [files] if isinstance(files, str) else None if files is None else [str(file) for file in files]
        self.save_hyperparameters(logger=False)
        # Here and not in setup(): what is wrong is then said before any process waits for another.
        self.text = find_text(files, max_bytes)
        self.tokenizer = load_tokenizer(tokenizer)
        self.length = length
        self.batch_size = batch_size
        self.fractions = {"val": val_fraction, "test": test_fraction}
        self.seed = seed
        self.num_workers = num_workers
        self.cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
        self._windows: dict[str, TokenWindows] = {}
        self._progress = Progress(seed)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the one that ends a text included."""
        return self.tokenizer.vocab_size

    def setup(self, stage: str) -> None:
        """Tokenizes the text or finds its tokens, and divides the windows among training, validation and testing.

        Every process does this for itself, so that each raises the same error and none waits for one that failed.

        Raises:
            ValueError: If the text is too short for the windows, or for the data ranks.
        """
        path = tokenize_once(self.text, self.tokenizer, self.cache_dir)
        tokens = len(open_tokens(path, self.vocab_size))
        counts = self._counts(tokens)
        first = 0
        for name, count in counts.items():
            self._windows[name] = TokenWindows(
                path, vocab_size=self.vocab_size, width=self.length + 1, first=first, count=count
            )
            first += count
        if stage == "fit":
            self._progress = Progress(self.seed)

    def train_dataloader(self) -> ResumableLoader:
        """Returns the loader of the training windows, in an order of their own in each epoch."""
        return self._loader("train", self._begin)

    def val_dataloader(self) -> ResumableLoader | list[ResumableLoader]:
        """Returns the loader of the validation windows, or none if ``val_fraction`` is 0."""
        return self._loader("val") if self._windows["val"] else []

    def test_dataloader(self) -> ResumableLoader | list[ResumableLoader]:
        """Returns the loader of the test windows, or none if ``test_fraction`` is 0."""
        return self._loader("test") if self._windows["test"] else []

    def state_dict(self) -> dict[str, int]:
        """Returns the position in the data, in samples over all data ranks.

        It counts the batches that were trained on, not those that were read ahead.
        """
        position = self._progress.at(self._batches().processed * self._global_batch)
        return {"format": STATE_FORMAT, **asdict(position), "epoch_samples": len(self._windows["train"])}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Takes the position that training goes on from.

        Raises:
            ValueError: If the state is of another format.
        """
        state = dict(state_dict)
        if state.pop("format", None) != STATE_FORMAT:
            raise ValueError(
                f"the checkpoint's data position has format {state_dict.get('format')}\n  valid: {STATE_FORMAT}"
            )
        samples = state.pop("epoch_samples")
        self._progress.load(Position(**state), samples)

    def _begin(self, trainer_epoch: int) -> Position:
        samples = self._batches().ready * self._global_batch
        return self._progress.begin(trainer_epoch, samples, len(self._windows["train"]))

    def _batches(self) -> _ProcessedTracker:
        trainer = self.trainer
        batches = _ProcessedTracker() if trainer is None else trainer.fit_loop.epoch_loop.batch_progress.current
        assert isinstance(batches, _ProcessedTracker)
        return batches

    @property
    def _global_batch(self) -> int:
        return self.batch_size * self._data_ranks()[0]

    def _data_ranks(self) -> tuple[int, int]:
        trainer = self.trainer
        found = None if trainer is None else trainer.distributed_sampler_kwargs
        return (1, 0) if found is None else (found["num_replicas"], found["rank"])

    def _loader(self, name: str, start: Callable[[int], Position] | None = None) -> ResumableLoader:
        windows = self._windows[name]
        replicas, rank = self._data_ranks()
        sampler = GlobalOrderSampler(
            windows,
            batch_size=self.batch_size,
            num_replicas=replicas,
            rank=rank,
            training=name == "train",
            seed=self.seed,
            start=start,
        )
        return ResumableLoader(
            windows,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )

    def _counts(self, tokens: int) -> dict[str, int]:
        windows = tokens // (self.length + 1)
        counts = {name: math.ceil(share * windows) for name, share in self.fractions.items()}
        counts = {"train": windows - sum(counts.values()), **counts}
        replicas, batch = self._data_ranks()[0], self._global_batch
        text = f"{tokens} tokens make {windows} windows of length {self.length} + 1"
        fix = "\n  fix: more text, or a smaller length or batch_size"
        if windows == 0:
            raise ValueError(f"the corpus is shorter than one window: {text}{fix}")
        if counts["train"] < batch:
            raise ValueError(
                f"{counts['train']} training windows are fewer than the {batch} of one step"
                f" (batch_size {self.batch_size} x {replicas} data ranks): {text}{fix}, or fewer data ranks"
            )
        for name in self.fractions:
            if 0 < counts[name] < replicas:
                raise ValueError(
                    f"{counts[name]} {name} windows are fewer than {replicas} data ranks: {text}{fix},"
                    f" a larger {name}_fraction, or {name}_fraction=0"
                )
        return counts


def _check(
    length: int, batch_size: int, val_fraction: float, test_fraction: float, seed: int, num_workers: int
) -> None:
    at_least = {
        "length": (length, 1),
        "batch_size": (batch_size, 1),
        "seed": (seed, 0),
        "num_workers": (num_workers, 0),
    }
    for name, (value, least) in at_least.items():
        if value < least:
            raise ValueError(f"{name}={value}\n  valid: an integer of at least {least}")
    for name, share in {"val_fraction": val_fraction, "test_fraction": test_fraction}.items():
        if not 0 <= share < 1:
            raise ValueError(f"{name}={share}\n  valid: from 0 to below 1")
    if val_fraction + test_fraction >= 1:
        raise ValueError(
            f"val_fraction={val_fraction} and test_fraction={test_fraction} leave no text for training\n"
            "  valid: a sum below 1"
        )
