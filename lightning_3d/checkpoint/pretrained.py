"""Pretrained weights, streamed into the parts that this rank holds of a module; no rank holds the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.checkpoint.absent import is_absent
from lightning_3d.checkpoint.agreement import gather, together
from lightning_3d.checkpoint.files import resolve
from lightning_3d.checkpoint.huggingface import HuggingFaceTensors, is_huggingface
from lightning_3d.checkpoint.joining import as_transformers_loads
from lightning_3d.checkpoint.layout import canonical, empty_like, is_cut, module_state, module_tensors
from lightning_3d.checkpoint.matching import Matching, match
from lightning_3d.checkpoint.packed import NO_LAYOUTS, unpacked
from lightning_3d.checkpoint.restore import open_checkpoint
from lightning_3d.checkpoint.sources import DirectoryTensors, Form, MappedTensors, TensorSource
from lightning_3d.checkpoint.store import MODULE_KEY
from lightning_3d.errors import CheckpointError, few_and_more
from lightning_3d.graph.parameters import class_name
from lightning_3d.shards.layout import Layout
from lightning_3d.units import format_bytes

# Where Lightning's FSDPStrategy keeps the module in a directory.
_FSDP_KEY = "model"
_FIX = "give a directory of safetensors, or a checkpoint that lightning_3d or Lightning saved"


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A model's weights on the disk.

    Attributes:
        source: Reads them.
        names: Name of the weight → its name in the source.
    """

    source: TensorSource
    names: Mapping[str, str]

    @property
    def forms(self) -> dict[str, Form]:
        """Shape and dtype of each weight."""
        return {name: self.source.forms[stored] for name, stored in self.names.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainedReport:
    """What came from where.

    Attributes:
        path: Where the weights lie.
        matching: How their names became the module's.
        count: Tensors that were read, of all ranks together.
        nbytes: Their bytes on the disk.
        missing: Names of the module that kept their initial values.
        unexpected: Stored names that the module has no place for.
    """

    path: Path
    matching: Matching
    count: int
    nbytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.count} tensors ({format_bytes(self.nbytes)}) were read from {self.path}, {self.matching}"

    @property
    def unmatched(self) -> str:
        """What did not match, in words; empty if all did."""
        kinds = {"of the module have no stored values": self.missing, "stored have no place in it": self.unexpected}
        return "; ".join(f"{len(names)} {kind} ({few_and_more(names)})" for kind, names in kinds.items() if names)


def open_weights(path: Path) -> Weights:
    """Opens the weights of a directory or a file, without reading any and without running code of theirs.

    Args:
        path: Hugging Face's safetensors, a checkpoint of ours, or one of Lightning's.

    Raises:
        CheckpointError: There is nothing that could be read.
    """
    path = resolve(path)
    if (path / ".metadata").is_file():
        directory = DirectoryTensors(path)
        for key in (MODULE_KEY, _FSDP_KEY):
            names = {name.removeprefix(f"{key}."): name for name in directory.forms if name.startswith(f"{key}.")}
            if names:
                return Weights(source=directory, names=names)
        raise CheckpointError(f"{path} holds no weights of a module", fix=_FIX)
    if is_huggingface(path):
        source: TensorSource = HuggingFaceTensors(path)
    elif path.is_dir():
        raise CheckpointError(
            f"{path} holds no weights that can be read",
            valid=f"*.safetensors, .metadata; there is {few_and_more(sorted(child.name for child in path.iterdir()))}",
            fix="model.save_pretrained(DIR) of Hugging Face writes safetensors",
        )
    else:
        whole = open_checkpoint(path, weights_only=True, group=None).whole or {}
        source = MappedTensors(path, {canonical(k): v for k, v in whole.items() if isinstance(v, Tensor)})
    return Weights(source=source, names={name: name for name in source.forms})


def load_pretrained(
    module: nn.Module,
    path: Path,
    *,
    strict: bool,
    group: dist.ProcessGroup | None,
    layouts: Mapping[str, Layout] = NO_LAYOUTS,
) -> PretrainedReport:
    """Reads weights into a module in place. Every rank calls it, and reads what it holds.

    Args:
        module: The module as this rank holds it, with memory of its own.
        path: See :func:`open_weights`.
        strict: Every weight must have its place, and every tensor of the module its weight.
        group: The ranks that load together, None for one process.
        layouts: See ``layout.module_state``.

    Raises:
        CheckpointError: On every rank: the weights cannot be read, or are of another model.
    """
    weights: Weights | None = None
    with together(group, f"open the weights {path}", _FIX):
        weights = _as_loaded(open_weights(path), module)
    assert weights is not None, "together() lets no failure through"
    targets = module_tensors(module, layouts)
    forms = weights.forms
    matching = match({name: form.shape for name, form in forms.items()}, {n: t.shape for n, t in targets.items()})
    if not matching.names:
        raise CheckpointError(
            f"no name in {path} is one of {class_name(module)}: there is {few_and_more(forms)}",
            valid=few_and_more(targets),
            fix="give the weights of this model",
        )
    _check_forms(forms, targets, matching, path)
    report = _report(module, layouts, weights, matching, targets)
    if strict and report.unmatched:
        raise CheckpointError(
            f"the weights of {path}, {matching}, are not all of {class_name(module)}: {report.unmatched}",
            fix="give the weights of this model, or let them match in part: pretrained_strict=False",
        )
    # Other names of a tied parameter: what they stand for must be the same.
    first: dict[int, str] = {}
    owners = {stored: first.setdefault(id(targets[name]), stored) for stored, name in matching.names.items()}
    into = {
        stored: targets[name] if owners[stored] == stored else empty_like(targets[name], targets[name].dtype)
        for stored, name in matching.names.items()
        if not is_absent(targets[name])
    }
    with torch.no_grad():
        weights.source.read({weights.names[name]: tensor for name, tensor in into.items()}, group)
    _check_ties(into, owners, path, group)
    return report


def _as_loaded(weights: Weights, module: nn.Module) -> Weights:
    """Returns the weights as transformers has them in its models, whose files may name and cut them otherwise."""
    if not isinstance(weights.source, HuggingFaceTensors):
        return weights
    source = as_transformers_loads(weights.source, module)
    return Weights(source=source, names={name: name for name in source.forms})


def _report(
    module: nn.Module,
    layouts: Mapping[str, Layout],
    weights: Weights,
    matching: Matching,
    targets: Mapping[str, Tensor],
) -> PretrainedReport:
    read = {id(targets[name]) for name in matching.names.values()}
    state = [name for name, value in module_state(module, layouts).items() if isinstance(value, Tensor)]
    # A model computes these itself; older files hold them.
    computed = {canonical(name) for name, _ in module.named_buffers()} - targets.keys()
    own_names = {name: f"{matching.added}{name.removeprefix(matching.removed)}" for name in weights.names}
    unexpected = [n for n in weights.names if n not in matching.names and own_names[n] not in computed]
    return PretrainedReport(
        path=weights.source.path,
        matching=matching,
        count=len(matching.names),
        nbytes=sum(weights.forms[name].nbytes for name in matching.names),
        missing=tuple(name for name in state if id(targets[name]) not in read),
        unexpected=tuple(unexpected),
    )


def _check_forms(forms: Mapping[str, Form], targets: Mapping[str, Tensor], matching: Matching, path: Path) -> None:
    wrong = [
        f"{name}: stored {tuple(forms[stored].shape)} {forms[stored].dtype}, here {tuple(targets[name].shape)} "
        f"{targets[name].dtype}"
        for stored, name in matching.names.items()
        if forms[stored].shape != targets[name].shape or _kind(forms[stored].dtype) != _kind(targets[name].dtype)
    ]
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} weights of {path} have another shape or kind: {few_and_more(wrong)}",
            fix="build the model with the sizes of the weights",
        )


def _kind(dtype: torch.dtype) -> str:
    return "floating" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def _check_ties(
    into: Mapping[str, Tensor], owners: Mapping[str, str], path: Path, group: dist.ProcessGroup | None
) -> None:
    pairs = {name: owners[name] for name in into if owners[name] != name}
    unequal = [name for name, owner in pairs.items() if not torch.equal(_local(into[name]), _local(into[owner]))]
    found = sorted({name for names in gather(group, unequal) for name in names})
    if found:
        raise CheckpointError(
            f"{path} has different values for {found[0]} and {owners[found[0]]}, which are one parameter here",
            fix="build the model without this tie (tie_word_embeddings=False)",
        )


def _local(tensor: Tensor) -> Tensor:
    tensor = unpacked(tensor)
    return tensor.to_local() if is_cut(tensor) else tensor  # type: ignore[union-attr]
