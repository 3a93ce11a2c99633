"""What is logged is equal on all ranks: values meet at moments that all ranks come to, by name, in one collective.

Lightning leaves values without ``sync_dist`` on their rank, and reduces those with it one by one where they are logged,
or where somebody first looks at them. Here all stay on their rank until the batch has run, or until the epoch ends, and
then become those of one device: a mean weighs samples, and a name that few ranks have logged is theirs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor

from lightning_3d.batches.logs import log_options, reduction_name
from lightning_3d.batches.metrics import MetricState, batch_of, computed
from lightning_3d.graph.calls import shadow
from lightning_3d.strategy.logging.metrics import MetricDoors
from lightning_3d.strategy.logging.named import NamedValues, Reduced, Share
from lightning_3d.strategy.steps.outputs import are_seen

V = TypeVar("V")

# The kind of a share that is computed from the states of a metric.
_STATES = "states"
# The weight of a value that says it stands for no sample: it counts where no other does.
_NO_SAMPLE = 1e-30
# What a rank starts with that adds nothing to a reduction.
_NOTHING: Mapping[str, float] = {"max": float("-inf"), "min": float("inf")}
# Lightning leaves values as they are, and does not advise to reduce them.
_UNREDUCED: Mapping[str, Any] = {"sync_dist": True, "rank_zero_only": True}
# What Lightning's result says of a name and takes when it is logged.
_TOLD = ("name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx", "metric_attribute")


class LoggedValues:
    """Takes what a module logs, and makes it equal on all ranks.

    Args:
        module: The user's module, on its Trainer.
        named: Reduces values by name.
        metrics: The doors of the module's metrics.
        log: Logs on this rank.
    """

    def __init__(
        self, module: LightningModule, named: NamedValues, metrics: MetricDoors, log: Callable[..., None]
    ) -> None:
        self._module = module
        self._trainer: Trainer = module.trainer
        self._named = named
        self._metrics = metrics
        self._log = log
        self._opened: list[Callable[[], None]] = []
        self._waiting: Callable[[], None] | None = None
        # Logged since values met: names for a step with the samples they stand for, and names for each loop's epoch.
        self._of_step: dict[str, float] = {}
        self._of_epoch: dict[int, dict[str, None]] = {}
        self._spoken_for: set[str] = set()

    # ---- doors ----

    def open(self) -> None:
        """Has values meet while the Trainer runs, if there are other ranks."""
        self._metrics.open()
        if self._opened or self._named.alone:
            return
        loop = self._trainer.fit_loop.epoch_loop
        connector: Any = self._trainer._logger_connector
        self._opened += [
            shadow(self._module, "log", lambda *args, **options: self._taken(*args, **options)),
            self._follow(loop.automatic_optimization, "run", after=self.batch_ran),
            self._follow(loop.manual_optimization, "run", after=self.batch_ran),
            self._follow(connector, "on_batch_start", after=self._batch_begins),
            self._follow(connector, "on_batch_end", before=self.batch_ends, after=self._batch_ended),
            self._follow(connector, "epoch_end_reached", before=self._epoch_ends),
            # Callbacks that decide by a value see it before Lightning takes those of the hook.
            self._follow(self._module, "on_train_epoch_end", after=self._epoch_ends),
            self._follow(connector, "on_epoch_end", before=self._epoch_ends),
        ]

    def close(self) -> None:
        """Leaves the Trainer and the metrics as they were."""
        while self._opened:
            self._opened.pop()()
        self._metrics.close()

    @staticmethod
    def _follow(
        owner: object, name: str, *, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
    ) -> Callable[[], None]:
        plain = getattr(owner, name)

        def method(*args: Any, **options: Any) -> Any:
            if before is not None:
                before()
            result = plain(*args, **options)
            if after is not None:
                after()
            return result

        return shadow(owner, name, method)

    # ---- logging ----

    def _taken(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Stands in for ``module.log``."""
        given = log_options(args, options)
        results = self._trainer._results
        if given.get("sync_dist_group") not in (None, torch.distributed.group.WORLD) or results is None:
            self._log(name, value, *args, **options)
            return
        alone = bool(given.get("rank_zero_only"))
        self._log(name, value, **{**given, **_UNREDUCED, "sync_dist_group": None})
        key = f"{self._module._current_fx_name}.{name}"
        if given.get("add_dataloader_idx", True) and results.dataloader_idx is not None:
            key += f".{results.dataloader_idx}"
        if key not in results:
            return
        if alone:
            self._spoken_for.add(key)
        meta = results[key].meta
        if meta.on_step:
            self._of_step[key] = self._samples(results, given.get("batch_size"))
        if meta.on_epoch:
            self._of_epoch.setdefault(id(results), {})[key] = None

    @staticmethod
    def _samples(results: Any, given: float | None) -> float:
        if given is not None:
            return float(given) or _NO_SAMPLE
        if results.batch is None:
            return 1.0
        if results.batch_size is None:
            try:
                results.batch_size = extract_batch_size(results.batch)
            except MisconfigurationException:
                return 1.0
        return float(results.batch_size)

    # ---- moments ----

    def batch_ran(self) -> None:
        """Has the values of a batch meet: those of its step and of the hooks before."""
        results = self._results
        if results is None or not self._opened:
            return
        sizes, self._of_step = self._of_step, {}
        shares = {
            key: self._of_one_step(key, results[key], size)
            for key, size in _valid(results, sizes).items()
            if isinstance(results[key]._forward_cache, Tensor)
        }
        for key, reduced in self._met(results, shares).items():
            entry = results[key]
            if reduced.kind == _STATES:
                state = batch_of(entry.value) if key in shares else None
                with self._metrics.alone():
                    shown = computed(entry.value, state or MetricState.empty(entry.value), synced=True)
            else:
                shown = reduced.value.to(self._module.device, reduced.about["dtype"])
            entry._forward_cache = shown
            if entry.is_tensor and not entry.meta.on_epoch:
                entry.value = shown

    def batch_ends(self) -> None:
        """Has values meet that the last hook of a batch may have logged."""
        stage = self._trainer.state.stage
        assert stage is not None, "a loop runs"
        if are_seen(self._module, {"train": "train", "test": "test"}.get(stage.value, "validation")):
            self.batch_ran()

    def answer_signals(self) -> None:
        """Has this rank do what signals have asked of any, as all ranks do after the same batch."""
        self._named.signals.answer(self._trainer)

    def after_batch(self, call: Callable[[], None]) -> None:
        """Has something happen when the batch that runs has ended, after its hooks and what they log.

        Args:
            call: Is called at once where the end of a batch is not told: nothing meets there either.
        """
        if self._opened and self._results is not None:
            self._waiting = call
        else:
            call()

    def _batch_ended(self) -> None:
        self.answer_signals()
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting()

    def _batch_begins(self) -> None:
        # An end that an error has kept from coming is not another batch's.
        self._waiting = None
        if self._trainer._logger_connector._first_loop_iter:
            self._metrics.open()

    def _epoch_ends(self) -> None:
        results = self._results
        if results is None:
            return
        fresh = _valid(results, self._of_epoch.pop(id(results), {}))
        shares = {key: self._of_one_epoch(key, results[key]) for key in fresh}
        for key, reduced in self._met(results, shares).items():
            entry = results[key]
            entry._computed = None
            if reduced.kind == _STATES:
                entry.compute()
            else:
                entry._computed = reduced.value.to(self._module.device, reduced.about["dtype"])

    @property
    def _results(self) -> Any:
        """What the running loop has been given to log; None if it logs nothing."""
        return None if self._trainer.barebones else self._trainer._results

    # ---- shares ----

    def _of_one_step(self, key: str, entry: _ResultMetric, samples: float) -> Share:
        shown: Any = entry._forward_cache
        if entry.is_tensor:
            return Share.of(reduction_name(entry.meta.reduce_fx), shown, self._counts(key, samples))
        metric: Any = entry.value
        if self._named.differ and batch_of(metric) is not None:
            return Share.of(_STATES, 0.0)
        return Share.of("mean", shown, self._counts(key, samples))

    def _of_one_epoch(self, key: str, entry: _ResultMetric) -> Share:
        if not entry.is_tensor:
            return Share.of(_STATES, 0.0)
        kind, counts = reduction_name(entry.meta.reduce_fx), self._counts(key, 1.0)
        if kind != "mean":
            return Share.of(kind, entry.value, counts)
        weight = entry.cumulated_batch_size.double() * counts
        return Share(kind=kind, total=entry.value.double() * counts, weight=weight)

    def _counts(self, key: str, samples: float) -> float:
        """The weight of this rank's value: nothing where rank 0 was to speak for all."""
        return samples if self._trainer.is_global_zero or key not in self._spoken_for else 0.0

    def _met(self, results: Any, shares: dict[str, Share]) -> dict[str, Reduced]:
        """The values of all names that any rank has. A collective."""
        found = self._named.reduce(shares, lambda key: _told(results[key]))
        if found.keys() != shares.keys():
            for key, reduced in found.items():
                if key not in results or results[key].has_reset:
                    self._add(results, key, reduced.about)
                # In one order on all ranks.
                results[key] = results.pop(key)
        return {key: replace(each, about=each.about or _told(results[key])) for key, each in found.items()}

    def _add(self, results: Any, key: str, told: Mapping[str, Any]) -> None:
        """Gives this rank a name that only others have logged, with nothing of its own in it."""
        options = {name: value for name, value in told.items() if name != "dtype"}
        value: Any = torch.tensor(_NOTHING.get(told["reduce_fx"], 0.0), dtype=told["dtype"], device=self._module.device)
        if told["metric_attribute"] is not None:
            value = self._module.get_submodule(told["metric_attribute"])
            # Others have told it something: it computes all the same.
            value._update_count = max(value._update_count, 1)
        hook = key.split(".", 1)[0]
        results.log(
            hook, value=value, batch_size=0, sync_dist_fn=self._trainer.strategy.reduce, **options, **_UNREDUCED
        )


def _valid(results: Any, keys: Mapping[str, V]) -> dict[str, V]:
    valid = {key for key, _ in results.valid_items()}
    return {key: value for key, value in keys.items() if key in valid}


def _told(entry: _ResultMetric) -> dict[str, Any]:
    """What another rank needs to know to have the name too."""
    meta = entry.meta
    held: Any = entry.value if entry.is_tensor else entry._forward_cache
    dtype = held.dtype if isinstance(held, Tensor) else torch.get_default_dtype()
    told = {name: getattr(meta, name) for name in _TOLD}
    return {**told, "reduce_fx": reduction_name(meta.reduce_fx), "dtype": dtype}
