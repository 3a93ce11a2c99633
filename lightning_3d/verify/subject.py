"""What is verified: how each process makes the user's module and data, and how much of the module it keeps."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.utilities.model_helpers import is_overridden
from omegaconf import DictConfig, OmegaConf

from lightning_3d.errors import ConfigError, ModuleError, PlanError
from lightning_3d.graph.blocks import Stack, find_stacks
from lightning_3d.graph.calls import shadow
from lightning_3d.graph.repeats import block_kinds


class Subject(Protocol):
    """Makes the same module and data in every process."""

    def build(self) -> tuple[LightningModule, Any]:
        """Returns the module, and a data module, loader, or None for the module's own loaders."""


@dataclass(frozen=True, slots=True)
class GivenSubject:
    """A module and data that were given as objects, or as functions that make them.

    Attributes:
        name: What it is called.
        pickled: Both, pickled.
        seed: Of every generator.
    """

    name: str
    pickled: bytes
    seed: int

    @classmethod
    def of(cls, module: Any, data: Any, seed: int) -> GivenSubject:
        """Returns the subject of what was given.

        Raises:
            ModuleError: It cannot be sent to other processes.
        """
        name = getattr(module, "__name__", type(module).__name__)
        try:
            return cls(name, pickle.dumps((module, data)), seed)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ModuleError(
                f"{name} and its data cannot be sent to the processes that run them: {error}",
                fix="give functions at the top of a module that make them, instead of objects",
            ) from error

    def build(self) -> tuple[LightningModule, Any]:
        """Returns the module and the data."""
        seed_everything(self.seed, workers=True, verbose=False)
        module, data = pickle.loads(self.pickled)
        module = module if isinstance(module, LightningModule) else module()
        if not isinstance(module, LightningModule):
            raise ConfigError(
                f"{self.name} makes a {type(module).__name__}, which is no LightningModule",
                valid="a LightningModule, or a function without arguments that returns one",
            )
        return module, data() if _is_function(data) else data


@dataclass(frozen=True, slots=True)
class ConfiguredSubject:
    """A module and data of a configuration.

    Attributes:
        parts: The resolved nodes ``model`` and ``data``.
        seed: Of every generator.
    """

    parts: dict[str, Any]
    seed: int

    def build(self) -> tuple[LightningModule, Any]:
        """Returns the module and the data, made as training makes them: the data first."""
        from hydra.utils import instantiate

        from lightning_3d.config.compose import readable_errors

        cfg = OmegaConf.create(self.parts)
        assert isinstance(cfg, DictConfig)
        seed_everything(self.seed, workers=True, verbose=False)
        with readable_errors():
            data = instantiate(cfg.data)
            return instantiate(cfg.model), data


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """What was left out of a stack.

    Attributes:
        stack: The whole stack.
        kept: Blocks that stay, the first ones.
        lost_kinds: Blocks that were left out although none that stays does the same.
    """

    stack: Stack
    kept: int
    lost_kinds: tuple[str, ...]

    def __str__(self) -> str:
        lost = f"; none like {', '.join(self.lost_kinds)} stays" if self.lost_kinds else ""
        return f"{self.stack.name}: the first {self.kept} of {len(self.stack.blocks)} {self.stack.kind}{lost}"


def shrink(module: LightningModule, layers: int | None) -> Callable[[], list[Cut]]:
    """Cuts the stacks of a module to their first blocks, now or once ``configure_model`` has made them.

    Args:
        module: The user's module.
        layers: Most blocks of a stack that stay; None for all.

    Returns:
        A function that gives what was cut so far.
    """
    if layers is None:
        return list
    cuts = cut_stacks(module, layers)
    if not is_overridden("configure_model", module):
        return lambda: cuts
    configure = module.configure_model

    def configure_less() -> None:
        configure()
        cuts.extend(cut_stacks(module, layers))

    shadow(module, "configure_model", configure_less)
    return lambda: cuts


def cut_stacks(module: LightningModule, layers: int) -> list[Cut]:
    """Takes all but the first blocks out of each stack that has more, in place."""
    cuts = []
    for stack in find_stacks(module):
        if len(stack.blocks) > layers:
            kinds = block_kinds(module, (stack,))
            kept = {kinds[name] for name in stack.blocks[:layers]}
            lost = tuple(name for name in stack.blocks[layers:] if kinds[name] not in kept)
            for name in stack.blocks[layers:]:
                holder, _, key = name.rpartition(".")
                del module.get_submodule(holder)._modules[key]
            cuts.append(Cut(stack=stack, kept=layers, lost_kinds=lost))
    return cuts


def check_cut(module: LightningModule, layers: int | None, cuts: list[Cut]) -> None:
    """Refuses a number of layers that cuts nothing because there is no stack.

    Raises:
        PlanError: The module has no list of blocks.
    """
    if layers is not None and not cuts and not find_stacks(module):
        raise PlanError(
            f"layers={layers} finds no stack of blocks in {type(module).__name__} to cut.",
            valid="a module with a ModuleList or Sequential of two or more blocks of one class",
            fix="leave layers out, and make the model smaller by its own options",
        )


def _is_function(data: Any) -> bool:
    return callable(data) and not hasattr(data, "__iter__")
