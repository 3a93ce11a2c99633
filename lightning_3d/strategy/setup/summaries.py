"""Summaries of a module with an example input: of the whole module, which on a mesh no rank runs any more."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelSummary

from lightning_3d.graph.fake_parameters import fake_parameters
from lightning_3d.graph.quiet import quiet
from lightning_3d.log import get_logger

_log = get_logger(__name__)


class WholeSummaries:
    """Sizes and operations of a module's layers, found before the module was cut.

    The example input runs through parameters without values, so that it costs no memory and works on the meta device.
    Numbers of parameters are looked up later, as they are then.
    """

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def make(self, module: LightningModule) -> None:
        """Makes the summaries that the callbacks of the module's Trainer will show.

        Args:
            module: The whole module, real or on the meta device.
        """
        self._made.clear()
        if module.example_input_array is None:
            return
        callbacks: list[Any] = module.trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks:
            if not isinstance(callback, ModelSummary) or not callback._max_depth:
                continue
            try:
                with fake_parameters(module), quiet(module):
                    self._made[callback._max_depth] = callback._summary(module.trainer, module)
            # The user's forward may do what needs values.
            except Exception as error:
                _log.debug("the example input was not run on the whole module: %s", error)

    def of(self, callback: ModelSummary) -> Any:
        """Returns the summary that a callback shows, None if it makes its own."""
        return self._made.get(callback._max_depth)
