"""Proofs of earlier runs: found again as long as nothing changed that they depend on."""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lightning_3d.graph.parameters import parameter_table
from lightning_3d.log import get_logger
from lightning_3d.parallel.tensor.plan import TensorPlan
from lightning_3d.parallel.tensor.proof.ranks import StepCall
from lightning_3d.parallel.tensor.proof.result import Proof

_log = get_logger(__name__)
# Distributions whose versions stand for the source of their classes.
_VERSIONS = ("torch", "lightning", "torchmetrics", "transformers", "lightning-3d")
_BY_VERSION = ("builtins", "torch", "lightning", "torchmetrics", "transformers", "lightning_3d")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# How deep and how far the attributes of a user's objects are read.
_DEPTH = 4
_LENGTH = 256


class ProofCache:
    """A directory with a file for each proof. What cannot be read or written is no proof, and no error.

    Args:
        directory: Where files are; made when one is written.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or default_directory()

    def find(self, key: str) -> Proof | None:
        """Returns the proof of this key, if there is one."""
        try:
            fields = json.loads(self._file(key).read_text(encoding="utf-8"))
            return replace(Proof(**fields), cached=True)
        except (OSError, ValueError, TypeError):
            return None

    def keep(self, key: str, proof: Proof) -> None:
        """Writes a proof, whole or not at all."""
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._directory, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(asdict(proof), file)
            os.replace(name, self._file(key))
        except OSError as failure:
            _log.debug("the proof is not kept: %s", failure)

    def _file(self, key: str) -> Path:
        return self._directory / f"{key}.json"


def default_directory() -> Path:
    """Returns where proofs are kept for a user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_3d" / "proofs"


def proof_key(module: nn.Module, call: StepCall, plan: TensorPlan) -> str | None:
    """Returns what a proof depends on, as one word; None if some of it cannot be read.

    That is the source of all classes in the module and their plain attributes, its parameters, the plan with its
    degree, what the step is called with, and versions.

    Args:
        module: The whole module.
        call: The step.
        plan: The plan.
    """
    sources = _sources(module)
    if sources is None:
        return None
    facts = {
        "sources": sources,
        "modules": [(name, _fact(vars(child), _DEPTH)) for name, child in module.named_modules()],
        "parameters": [repr(row) for row in parameter_table(module).rows],
        "plan": [
            plan.size,
            plan.sequence,
            sorted(plan.partial),
            sorted((name, repr(layout)) for name, layout in plan.layouts.items()),
            [(region.module, sorted(map(repr, region.outputs.items()))) for region in plan.regions],
        ],
        "step": [call.method, [_argument(leaf) for leaf in pytree.tree_leaves(call.args)]],
        "versions": [sys.version_info[:2], *map(_version, _VERSIONS)],
    }
    return hashlib.sha256(repr(facts).encode()).hexdigest()


# ---- sources ----


def _sources(module: nn.Module) -> list[tuple[str, str]] | None:
    """A digest of each class of the module and of each file that they need; None if a class has no source."""
    found: dict[str, str] = {}
    classes = {cls for child in module.modules() for cls in type(child).__mro__}
    classes = {cls for cls in classes if cls.__module__.split(".")[0] not in _BY_VERSION}
    for cls in classes:
        try:
            found[f"{cls.__module__}.{cls.__qualname__}"] = _digest(inspect.getsource(cls).encode())
        except (OSError, TypeError):
            return None
    files = _files({__name__, *(cls.__module__ for cls in classes)})
    return sorted([*found.items(), *((str(file), _digest(file.read_bytes())) for file in files)])


def _files(names: set[str]) -> set[Path]:
    """The files of modules, and of all modules from which they have something, but for installed ones."""
    libraries = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    found: dict[str, Path] = {}
    waiting = sorted(names)
    while waiting:
        name = waiting.pop()
        file = getattr(sys.modules.get(name), "__file__", None)
        if name in found or not isinstance(file, str) or file.startswith(libraries) or not Path(file).is_file():
            continue
        found[name] = Path(file)
        held = vars(sys.modules[name]).values()
        waiting += [value.__name__ for value in held if isinstance(value, ModuleType)]
        waiting += [where for value in held if isinstance(where := getattr(value, "__module__", None), str)]
    return set(found.values())


def _digest(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


# ---- attributes ----


def _fact(value: Any, depth: int) -> Any:
    """What can be told of a value in every process alike."""
    if isinstance(value, Tensor):
        return tuple(value.shape), str(value.dtype), value.requires_grad
    if isinstance(value, _PLAIN):
        return repr(value)
    fact = partial(_fact, depth=depth - 1)
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if depth == 0 or isinstance(value, nn.Module):
        return name
    if isinstance(value, Mapping):
        return name, sorted((str(key), repr(fact(each))) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return name, len(value), [fact(each) for each in value[:_LENGTH]]
    if isinstance(value, (set, frozenset)):
        return name, sorted(repr(fact(each)) for each in value)
    if callable(value):
        return getattr(value, "__qualname__", name)
    return name, sorted((key, repr(fact(each))) for key, each in _attributes(value))


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of an object that is not the Trainer, which knows the time and the place."""
    if type(value).__module__.split(".")[0] not in ("lightning", "torchmetrics"):
        # Hashes are others in each process.
        yield from (item for item in getattr(value, "__dict__", {}).items() if not item[0].endswith("hash"))


def _argument(leaf: Any) -> Any:
    return (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else repr(type(leaf))
