"""What all ranks must run alike: versions, options, seed and the user's code, compared before anything is shared."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from torch import nn

from lightning_3d import __version__
from lightning_3d.checkpoint.agreement import gather
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import ConfigError
from lightning_3d.faults.report import grouped

# Options that each rank may have for itself.
_OWN_OPTIONS = ("explain", "pretrained", "process_group_backend", "timeout_seconds")
_OURS = ("lightning_3d", "lightning", "torch", "builtins")
_NOT_THERE = "not there"


def check_same_program(config: StrategyConfig, module: nn.Module, group: dist.ProcessGroup) -> None:
    """Refuses ranks that run different programs: they would wait for each other, or compute something else together.

    A collective.

    Args:
        config: This rank's options.
        module: The user's module, as it was given to the Trainer.
        group: All ranks.

    Raises:
        ConfigError: On every rank: everything that differs, with the ranks and their values.
    """
    everyone = differing(facts_of(config, module), group)
    if everyone is not None:
        raise disagreement(everyone)


def facts_of(config: StrategyConfig, module: nn.Module) -> dict[str, str]:
    """Returns what must be equal on all ranks, by what it is called in an error."""
    options = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    facts = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "lightning": str(lightning.__version__),
        "lightning_3d": __version__,
        "seed_everything": os.environ.get("PL_GLOBAL_SEED", "not called"),
    }
    facts |= {f"strategy.{name}": repr(value) for name, value in options.items() if name not in _OWN_OPTIONS}
    return facts | dict(_code_of(type(each) for each in (module, *module.modules())))


def disagreement(facts: Sequence[Mapping[str, str]]) -> ConfigError:
    """Returns the error that names what differs between ranks.

    Args:
        facts: Those of each rank.
    """
    lines = [f"{name}: {'; '.join(values)}" for name, values in unlike(facts)]
    return ConfigError(
        "the ranks do not run the same program:\n  " + "\n  ".join(lines),
        fix="start the same code in the same environment, with the same options and one seed, on every rank",
    )


def differing(shown: Mapping[str, str], group: dist.ProcessGroup) -> list[dict[str, str]] | None:
    """Returns what each rank has, if it is not the same on all of them; None if it is. A collective.

    Args:
        shown: What this rank has, by name.
        group: All ranks.
    """
    digest = hashlib.blake2b(repr(sorted(shown.items())).encode(), digest_size=16).digest()
    # Most jobs are alike, and then little has travelled.
    return gather(group, dict(shown)) if len(set(gather(group, digest))) > 1 else None


def unlike(everyone: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Yields each name that does not stand for the same on all ranks, and its values with their ranks.

    Args:
        everyone: What each rank has.
    """
    for name in dict.fromkeys(name for each in everyone for name in each):
        values = {rank: each.get(name, _NOT_THERE) for rank, each in enumerate(everyone)}
        if len(set(values.values())) > 1:
            yield name, [f"{value} on {ranks}" for value, ranks in grouped(values)]


def _code_of(classes: Iterable[type]) -> Iterator[tuple[str, str]]:
    """Yields the files of classes and of what they inherit from, by class and as a digest; of packages the version."""
    for cls in dict.fromkeys(base for each in classes for base in each.__mro__):
        package = cls.__module__.partition(".")[0]
        if package in _OURS:
            continue
        version = getattr(sys.modules.get(package), "__version__", None)
        if version is not None:
            yield package, str(version)
        elif (file := _source_of(cls)) is not None:
            yield f"code of {cls.__qualname__} in {file.name}", _digest(file)


def _source_of(cls: type) -> Path | None:
    try:
        file = inspect.getsourcefile(cls)
    except (TypeError, OSError):
        # Typed into a notebook, or made while the program runs.
        return None
    return None if file is None or not Path(file).is_file() else Path(file)


@cache
def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=4).hexdigest()
