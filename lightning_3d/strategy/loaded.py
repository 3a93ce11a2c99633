"""What became of a checkpoint beside weights and optimizers: schedulers, scaler, loops, data, callbacks, averages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import WeightAveraging

from lightning_3d.checkpoint.report import LoadedPart
from lightning_3d.mesh.spec import AXIS_KEYS

_AVERAGES = ("current_model_state", "averaging_state")
# What Lightning writes beside the parts that are reported one by one.
_LIGHTNINGS = (
    *("epoch", "global_step", "pytorch-lightning_version", "loops", "callbacks", "lr_schedulers"),
    *("hparams_name", "hparams_type", "datamodule_hparams_name", "datamodule_hparams_type"),
    *("hyper_parameters", "datamodule_hyper_parameters"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The mesh that saves or loads a checkpoint.

    Attributes:
        data: Degree of the data axis.
        pipeline: Degree of the pipeline axis.
        tensor: Degree of the tensor axis.
        zero_stage: What the data axis shards.
    """

    data: int
    pipeline: int
    tensor: int
    zero_stage: int

    def plain(self) -> dict[str, int]:
        """Returns it as a checkpoint holds it."""
        return {name: getattr(self, name) for name in (*AXIS_KEYS, "zero_stage")}

    def __str__(self) -> str:
        axes = [f"{axis} {getattr(self, axis)}" for axis in AXIS_KEYS if getattr(self, axis) > 1]
        zero = f", zero {self.zero_stage}" if self.data > 1 else ""
        return f"{' x '.join(axes)}{zero}" if axes else "one device"


def origin_of(about: Mapping[str, Any] | None) -> str:
    """Returns in words who saved a checkpoint, by what it says of itself."""
    if about is None:
        return "another program"
    try:
        return str(Origin(**about["origin"]))
    except (KeyError, TypeError):
        return "a mesh that it does not name"


def parts_of(
    metadata: Mapping[str, Any], trainer: Trainer, *, places: Sequence[Any], data_ranks: int, scaler_keys: Sequence[str]
) -> Iterator[LoadedPart]:
    """Yields what became of all that Lightning restores itself when a training resumes.

    Args:
        metadata: From the checkpoint.
        trainer: Whose training is about to begin.
        places: Where the training loaders were.
        data_ranks: How many data ranks there are now.
        scaler_keys: The keys under which a loss scaler may be saved.
    """
    yield _schedulers(metadata.get("lr_schedulers") or [], trainer)
    yield _scaler(any(key in metadata for key in scaler_keys), trainer)
    if "loops" in metadata:
        yield LoadedPart(name="loops", restored=(f"epoch {metadata.get('epoch')}, step {metadata.get('global_step')}",))
    else:
        yield LoadedPart(name="loops", missing=("the loops",))
    yield _data(places, data_ranks)
    callbacks: Sequence[Callback] = getattr(trainer, "callbacks", ())
    yield _callbacks(metadata.get("callbacks") or {}, callbacks)
    yield _averages(metadata, callbacks)
    known = {*_LIGHTNINGS, *_AVERAGES, *scaler_keys}
    yield LoadedPart(name="entries for hooks", restored=tuple(str(key) for key in metadata if key not in known))


def _schedulers(saved: Sequence[Any], trainer: Trainer) -> LoadedPart:
    names = [f"{index} ({type(each.scheduler).__name__})" for index, each in enumerate(trainer.lr_scheduler_configs)]
    return LoadedPart(
        name="schedulers",
        restored=tuple(names[: len(saved)]),
        missing=tuple(names[len(saved) :]),
        unexpected=tuple(f"{index}" for index in range(len(names), len(saved))),
    )


def _scaler(saved: bool, trainer: Trainer) -> LoadedPart:
    used = getattr(trainer.precision_plugin, "scaler", None) is not None
    name = ("the scaler",)
    return LoadedPart(
        name="loss scaler",
        restored=name if saved and used else (),
        missing=name if used and not saved else (),
        unexpected=name if saved and not used else (),
    )


def _data(places: Sequence[Any], data_ranks: int) -> LoadedPart:
    restored, converted = [], []
    for index, place in enumerate(places):
        if place is None:
            restored.append(f"loader {index}, which tells its own")
        elif place["ranks"] != data_ranks:
            converted.append(f"loader {index}: read by {place['ranks']} data ranks, now by {data_ranks}")
        else:
            restored.append(f"loader {index}")
    return LoadedPart(name="data position", restored=tuple(restored), converted=tuple(converted))


def _callbacks(saved: Mapping[Any, Any], callbacks: Sequence[Callback]) -> LoadedPart:
    # Their state is not asked for: some have one only later.
    keeps = {callback.state_key for callback in callbacks if type(callback).state_dict is not Callback.state_dict}
    here = {key for callback in callbacks for key in (callback.state_key, callback._legacy_state_key)}
    return LoadedPart(
        name="callbacks",
        restored=tuple(str(key) for key in saved if key in here),
        missing=tuple(sorted(key for key in keeps if key not in saved)),
        unexpected=tuple(str(key) for key in saved if key not in here),
    )


def _averages(metadata: Mapping[str, Any], callbacks: Sequence[Callback]) -> LoadedPart:
    users = [type(each).__name__ for each in callbacks if isinstance(each, WeightAveraging)]
    saved = all(key in metadata for key in _AVERAGES)
    return LoadedPart(
        name="averaged weights",
        restored=tuple(users) if saved else (),
        missing=() if saved else tuple(users),
        unexpected=("averages that no callback takes",) if saved and not users else (),
    )
