"""Where training stands in its data, and where it goes on after a resumption."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A place in the data.

    Attributes:
        seed: Chooses, with the epoch, the order of the samples.
        epoch: Passes over the samples finished before.
        samples: Samples of this pass finished, over all data ranks.
    """

    seed: int
    epoch: int = 0
    samples: int = 0


class Progress:
    """Keeps the position in the data in step with the Trainer's counters.

    The Trainer says how far it is in its epoch; this class knows which pass over the data that epoch is. The two
    numbers part when a run ends in the middle of an epoch: the Trainer counts that epoch as done, and a resumed run
    reads its rest under the next number.

    Args:
        seed: Chooses the orders, unless a loaded position brings its own.
    """

    def __init__(self, seed: int) -> None:
        self._last = Position(seed=seed)
        self._epochs_behind = 0
        self._loaded_epoch_samples: int | None = None

    def load(self, position: Position, epoch_samples: int) -> None:
        """Takes the position of a checkpoint.

        Args:
            position: Where training stood.
            epoch_samples: Samples in an epoch then.
        """
        self._last = position
        self._loaded_epoch_samples = epoch_samples

    def begin(self, trainer_epoch: int, samples: int, epoch_samples: int) -> Position:
        """Returns the position at which the Trainer begins to read.

        Args:
            trainer_epoch: The Trainer's number of the epoch.
            samples: What the Trainer counts as finished in that epoch, in samples over all data ranks.
            epoch_samples: Samples in an epoch.

        Raises:
            ValueError: If a loaded position cannot be gone on from exactly.
        """
        if self._loaded_epoch_samples is not None:
            epoch = self._resumed_epoch(samples, epoch_samples)
            self._epochs_behind = trainer_epoch - epoch
            self._loaded_epoch_samples = None
        self._last = Position(seed=self._last.seed, epoch=trainer_epoch - self._epochs_behind, samples=samples)
        return self._last

    def at(self, samples: int) -> Position:
        """Returns the position when the Trainer has finished ``samples`` of the epoch that is being read."""
        if self._loaded_epoch_samples is not None:
            return self._last
        return Position(seed=self._last.seed, epoch=self._last.epoch, samples=samples)

    def _resumed_epoch(self, samples: int, epoch_samples: int) -> int:
        last = self._last
        if samples == 0:
            return last.epoch + (last.samples > 0)
        if samples != last.samples:
            raise ValueError(
                f"the checkpoint stands after {last.samples} samples of an epoch, and the batches done are"
                f" {samples} samples with this batch size\n"
                "  fix: resume with the same batch_size x data ranks, or from a checkpoint of an epoch's end"
            )
        if epoch_samples != self._loaded_epoch_samples:
            raise ValueError(
                f"the checkpoint stands in the middle of an epoch of {self._loaded_epoch_samples} samples, and this"
                f" text has {epoch_samples}\n"
                "  fix: resume with the same files, tokenizer, length and fractions, or from an epoch's end"
            )
        return last.epoch
