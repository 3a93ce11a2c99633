"""The structure of a module beside its tensors: which class stands where, so that layers are not swapped silently.

Weights go by name and shape, and two layers may have both in common: blocks of two classes in another order, another
activation, another epsilon. What is noted are the classes of all modules, the settings that they show (``extra_repr``:
an epsilon, a stride, a probability) and the tensors that they own. What a class does in ``forward``, and settings that
it does not show, nobody can see.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_3d.checkpoint.layout import canonical
from lightning_3d.checkpoint.report import LoadedPart
from lightning_3d.errors import CheckpointError

# Where an object lies in memory says nothing of it.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One module of a tree.

    Attributes:
        kind: The name of its class.
        settings: What it shows of itself.
        tensors: Names and shapes of the tensors that it owns.
    """

    kind: str
    settings: str
    tensors: str

    def __str__(self) -> str:
        return f"{self.kind}({self.settings})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Differences:
    """How two structures differ where they have the same names, in words.

    Attributes:
        swapped: Layers with tensors that have changed places.
        changed: Layers of another class, or with other settings.
    """

    swapped: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """The modules below a module, by name."""

    layers: Mapping[str, Layer]

    @classmethod
    def of(cls, module: nn.Module) -> Structure:
        """Returns the structure of a whole module, before anything is cut or wrapped."""
        return cls(layers={canonical(name): _layer(part) for name, part in module.named_modules() if canonical(name)})

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Structure:
        """Returns what :meth:`plain` has made plain."""
        rows: Sequence[Sequence[str]] = plain["modules"]
        return cls(layers={name: Layer(kind=kind, settings=shown, tensors=own) for name, kind, shown, own in rows})

    @property
    def digest(self) -> str:
        """A hash of all of it."""
        return hashlib.sha256("\n".join("\t".join(row) for row in self._rows()).encode()).hexdigest()

    def plain(self) -> dict[str, Any]:
        """Returns it in plain containers, with its hash."""
        return {"digest": self.digest, "modules": self._rows()}

    def differences(self, saved: Structure) -> Differences:
        """Returns where this structure is another one than that of a checkpoint.

        Modules that only one of them has are not compared: if they own tensors, the names of those say so.
        """
        if saved.layers == self.layers:
            return Differences()
        return Differences(swapped=tuple(_swapped(saved, self)), changed=tuple(_changed(saved, self)))

    def _rows(self) -> list[list[str]]:
        return [[name, layer.kind, layer.settings, layer.tensors] for name, layer in self.layers.items()]

    def children(self) -> dict[str, list[str]]:
        """Returns the names of the modules below each module."""
        found: dict[str, list[str]] = {}
        for name in self.layers:
            found.setdefault(name.rpartition(".")[0], []).append(name)
        return found


def compared(path: object, saved: Mapping[str, Any] | None, now: Structure, *, strict: bool) -> LoadedPart:
    """Compares the structure of a module with that of a checkpoint, before its weights are loaded.

    Args:
        path: Where the checkpoint lies.
        saved: Its structure in plain containers; None in a checkpoint that has none.
        now: That of the module.
        strict: Layers that have changed places are an error (Lightning's ``strict_loading``).

    Raises:
        CheckpointError: Names the first of them.
    """
    if saved is None or saved["digest"] == now.digest:
        return LoadedPart(name="structure")
    found = now.differences(Structure.from_plain(saved))
    if found.swapped and strict:
        raise CheckpointError(
            f"the layers of {path} stand in another order: {found.swapped[0]}",
            fix="build the model with its layers in the order in which they were saved, or load the weights into other "
            "layers on purpose: LightningModule.strict_loading = False",
        )
    return LoadedPart(name="structure", converted=found.swapped + found.changed)


def _layer(module: nn.Module) -> Layer:
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return Layer(
        kind=type(module).__qualname__,
        settings=_ADDRESS.sub("", _shown(module)),
        tensors=", ".join(f"{name} {_shape(tensor)}" for name, tensor in sorted(own, key=lambda item: item[0])),
    )


def _shown(module: nn.Module) -> str:
    try:
        return str(module.extra_repr())
    except Exception:
        # It is the user's, for printing, and may need what is not there yet.
        return ""


def _shape(tensor: Tensor) -> tuple[int, ...] | str:
    try:
        return tuple(tensor.shape)
    except RuntimeError:
        return "later"


def _swapped(saved: Structure, now: Structure) -> list[str]:
    """Names the layers of every module that has the layers it had, in another order."""
    before, after = saved.children(), now.children()
    old, new = _whole(saved, before), _whole(now, after)
    found: dict[str, str] = {}
    for parent, children in after.items():
        if sorted(before.get(parent, ())) != sorted(children) or any(f"{parent}.".startswith(f"{up}.") for up in found):
            continue
        moved = [name for name in children if old[name] != new[name]]
        if sorted(old[name] for name in moved) != sorted(new[name] for name in moved):
            continue
        if any(_has_tensors(now, name) for name in moved):
            first = moved[0]
            place = next(name for name in moved if old[name] == new[first])
            text = f"{first} is the {now.layers[first].kind} that was saved as {place}"
            found |= dict.fromkeys(moved, text)
    return list(dict.fromkeys(found.values()))


def _changed(saved: Structure, now: Structure) -> list[str]:
    common = [(name, layer, saved.layers[name]) for name, layer in now.layers.items() if name in saved.layers]
    kinds = [f"{name} is a {new.kind}, saved as a {old.kind}" for name, new, old in common if new.kind != old.kind]
    same = [(name, new, old) for name, new, old in common if new.kind == old.kind]
    return kinds + [f"{name} is {new}, saved as {old}" for name, new, old in same if new.settings != old.settings]


def _whole(structure: Structure, children: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Returns each layer with all that is below it, as one text that does not have its name."""
    texts: dict[str, str] = {}
    for name in sorted(structure.layers, key=lambda each: -each.count(".")):
        below = [f"{child.rpartition('.')[2]}={texts[child]}" for child in sorted(children.get(name, ()))]
        layer = structure.layers[name]
        own = hashlib.sha256(f"{layer}[{layer.tensors}]{{{','.join(below)}}}".encode())
        texts[name] = own.hexdigest()
    return texts


def _has_tensors(structure: Structure, name: str) -> bool:
    return any(
        layer.tensors for other, layer in structure.layers.items() if other == name or other.startswith(f"{name}.")
    )
