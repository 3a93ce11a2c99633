"""Weights as Hugging Face writes them: files of a limited size and their index, tied weights once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_3d.checkpoint.huggingface import INDEX_SUFFIX
from lightning_3d.checkpoint.matching import common_beginning
from lightning_3d.checkpoint.sources import TensorSource
from lightning_3d.checkpoint.stored import StoredTensor
from lightning_3d.errors import CheckpointError, ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """What goes into the files.

    Attributes:
        prefix: What was taken off the names.
        tensors: By the names in the files.
        tied: Names that are left out, since another of the same bytes is written.
        outside: Names that are left out, since they do not begin with the prefix or are no tensors.
    """

    prefix: str
    tensors: Mapping[str, StoredTensor]
    tied: tuple[str, ...]
    outside: tuple[str, ...]


def choose(module: Mapping[str, Any], prefix: str | None) -> Export:
    """Chooses names and tensors.

    Args:
        module: State of a module; tied names have one object.
        prefix: To take off the names; None finds the attribute that everything lies under.

    Raises:
        ConfigError: No name begins with the prefix.
    """
    names = [name for name, value in module.items() if isinstance(value, StoredTensor)]
    found = common_beginning(dict.fromkeys(names)) if prefix is None else prefix
    inside = [name for name in names if name.startswith(found)]
    if not inside:
        raise ConfigError(f"--prefix {found}: no name begins so", valid=sorted({_first(name) for name in names}))
    chosen = set(inside)
    first: dict[int, str] = {}
    owners = {name: first.setdefault(id(module[name]), name) for name in inside}
    return Export(
        prefix=found,
        tensors={name.removeprefix(found): module[name] for name in inside if owners[name] == name},
        tied=tuple(name.removeprefix(found) for name in inside if owners[name] != name),
        outside=tuple(name for name in module if name not in chosen),
    )


def save_files(export: Export, directory: Path, size: str) -> int:
    """Writes the files, one in memory at a time.

    Args:
        export: From :func:`choose`.
        directory: An empty directory.
        size: The largest file, as "5GB".

    Returns:
        How many files of weights there are.

    Raises:
        CheckpointError: The packages that write them are not installed.
        ConfigError: The size is none.
    """
    try:
        from huggingface_hub import split_torch_state_dict_into_shards
        from safetensors.torch import save_file
    except ImportError as error:
        raise CheckpointError(
            f"safetensors are written with {error.name}", fix="pip install 'lightning-3d[hf]'"
        ) from error
    forms = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in export.tensors.items()}
    try:
        parts = split_torch_state_dict_into_shards(forms, max_shard_size=int(size) if size.isdigit() else size)
    except ValueError as error:
        raise ConfigError(f"--max-shard-size {size}: {error}", valid="a number of bytes, 500MB, 5GB") from error
    for file, names in parts.filename_to_tensors.items():
        save_file(_read({name: export.tensors[name] for name in names}), directory / file, metadata={"format": "pt"})
    if parts.is_sharded:
        index = {"metadata": parts.metadata, "weight_map": parts.tensor_to_filename}
        (directory / f"model{INDEX_SUFFIX}").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return len(parts.filename_to_tensors)


def _read(tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    into = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    by_source: dict[TensorSource, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        by_source.setdefault(tensor.source, {})[tensor.key] = into[name]
    for source, targets in by_source.items():
        source.read(targets)
    return into


def _first(name: str) -> str:
    return name.partition(".")[0] + ("." if "." in name else "")
