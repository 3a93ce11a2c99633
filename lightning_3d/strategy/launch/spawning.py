"""Processes that Python starts from this one, as notebooks need: what they have trained comes back into this one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from typing import Any

from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher, _WorkerOutput
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from typing_extensions import override

from lightning_3d.checkpoint.layout import canonical
from lightning_3d.config.schema import IN_NOTEBOOKS, NEW_PROGRAMS
from lightning_3d.graph.calls import shadow


def start_method(wanted: str) -> str:
    """Returns how the processes of a node are started.

    Args:
        wanted: The option; "auto" starts the program again for each rank, but forks in a notebook, which is none.
    """
    if wanted != "auto":
        return wanted
    return IN_NOTEBOOKS if _IS_INTERACTIVE else NEW_PROGRAMS


class Mesh3DProcessLauncher(_MultiProcessingLauncher):
    """Lightning's launcher of processes from objects of this one, made right for modules that are cut in them.

    As with Lightning's ``ddp_spawn`` and ``ddp_notebook``, the weights of a fit, the metrics, the Trainer's state and
    the path of the best checkpoint come back.

    Args:
        strategy: Whose processes they are.
        method: "spawn", "fork" or "forkserver".
        whole_state: Returns the whole state of the module, in the processes and on every rank.
    """

    def __init__(self, strategy: ParallelStrategy, method: Any, whole_state: Callable[[], dict[str, Any]]) -> None:
        super().__init__(strategy, start_method=method)
        self._whole_state = whole_state

    @override
    def _collect_rank_zero_results(self, trainer: Trainer, results: Any) -> _WorkerOutput | None:
        with ExitStack() as stack:
            if trainer.state.fn == TrainerFn.FITTING:
                # It asks for the module's state, of which each rank has a part.
                whole = _in_names_of(trainer.lightning_module, self._whole_state())
                stack.callback(shadow(trainer.lightning_module, "state_dict", lambda: whole))
            return super()._collect_rank_zero_results(trainer, results)

    @override
    def _recover_results_in_main_process(self, worker_output: _WorkerOutput, trainer: Trainer) -> None:
        if worker_output.weights_path is not None:
            # Where the model is made, so that there is something to load into.
            with trainer.precision_plugin.module_init_context():
                trainer.lightning_module.configure_model()
        super()._recover_results_in_main_process(worker_output, trainer)


def _in_names_of(module: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Returns a state under the names that the module itself has for it, those of compiled parts included."""
    tensors = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    names = {canonical(name): name for name, _ in tensors}
    return {names.get(name, name): value for name, value in state.items()}
