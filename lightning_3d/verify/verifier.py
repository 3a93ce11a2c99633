"""Verifying a module on a mesh: one device twice, the mesh once, a comparison, and a search where they differ."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from typing import Any

from lightning_3d import __version__
from lightning_3d.config.devices import smallest_world
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import ConfigError, RunError, few_and_more, nearest
from lightning_3d.log import get_logger
from lightning_3d.mesh.spec import AXIS_KEYS
from lightning_3d.precision import PRECISIONS
from lightning_3d.strategy import Mesh3DStrategy
from lightning_3d.verify.certificate import Certificate, Place, Setting
from lightning_3d.verify.comparison import EXACT, FP32, FP64, Bounds, compare, not_finite, reduced, unlike
from lightning_3d.verify.runs import Request, Runs, Trained
from lightning_3d.verify.search import Ground, place_alone, place_of_failure, place_on_mesh
from lightning_3d.verify.subject import GivenSubject

_log = get_logger(__name__)

AUTO, _WIDE, _PLAIN = "auto", "64-true", "32-true"
_BF16_ROUNDING = 2.0**-9
# Arguments of the Trainer that hold here too.
TRAINER_OPTIONS = (
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "sync_batchnorm",
    "detect_anomaly",
)
_NEVER = (
    "validation, test and predict steps",
    "optimizer state, except by the parameters that it leads to",
    "callbacks, loggers and checkpoints, which did not run",
    "how loaders deal samples to data ranks: each rank was given batches of the loader in turn",
)
_MOST_PLACES = 4


def verify(
    module: Any,
    datamodule: Any = None,
    strategy: Mesh3DStrategy | Mapping[str, Any] | None = None,
    *,
    devices: int | None = None,
    layers: int | None = None,
    steps: int = 3,
    precision: str = AUTO,
    trainer: Mapping[str, Any] | None = None,
    seed: int = 0,
    timeout_seconds: float = 300.0,
) -> Certificate:
    """Trains a module a few steps on one device and on a mesh of local CPU processes, and compares everything.

    The reference is one device with all degrees 1 and the same global micro-batches. What is compared: initial
    weights, losses, logged values, every gradient and their norm at each optimizer step, parameters and other state
    after the steps. A tensor's error is max|a - b| / max|b|; a tensor whose largest value is below a millionth of the
    largest of its kind is compared on the scale of that one.

    Args:
        module: A LightningModule, or a function at the top of a module that makes one. Its code must be importable
            by other processes.
        datamodule: A LightningDataModule, a loader, or a function that makes one; None for the module's own loader.
        strategy: The strategy, or its options; None for all processes on the data axis.
        devices: Processes; None for what the degrees make, with 2 data ranks where nothing is said.
        layers: Most blocks of each stack that stay; None for all.
        steps: Optimizer steps.
        precision: One of ``PRECISIONS``; ``"auto"`` is fp64, or fp32 for a module that fails in fp64.
        trainer: Further arguments of the Trainer, some of ``TRAINER_OPTIONS``, such as ``gradient_clip_val``.
        seed: Of every generator.
        timeout_seconds: Time that each training may take, in seconds; its processes are killed then.

    Returns:
        The certificate; ``certificate.equal`` is the verdict, ``str(certificate)`` the text.

    Raises:
        ConfigError: An argument is impossible.
        Lightning3DError: The mesh refuses the module, or the module cannot be sent to other processes.
        RunError: A training on one device failed, or took too long.
    """
    subject = GivenSubject.of(module, datamodule, seed)
    options = _options(strategy)
    request = Request(
        subject=subject,
        layers=layers,
        options=options,
        world=smallest_world(StrategyConfig.from_mapping(options), 2) if devices is None else devices,
        steps=steps,
        trainer=trainer or {},
        seed=seed,
        seconds=timeout_seconds,
        preload=_modules_of(module, datamodule),
    )
    return certify(request, precision)


def certify(request: Request, precision: str = AUTO) -> Certificate:
    """Returns the certificate of a request; see `verify`.

    Args:
        request: What to train.
        precision: One of ``PRECISIONS``, or "auto".
    """
    request, notes = _fitting(request)
    _check(request, precision)
    began = time.monotonic()
    with Runs(request) as runs:
        found = _Case(runs, precision, notes).certificate()
    return _timed(found, time.monotonic() - began)


class _Case:
    """One verification under way."""

    def __init__(self, runs: Runs, precision: str, notes: Sequence[str]) -> None:
        self._runs = runs
        self._notes = list(notes)
        self._asked = precision

    def certificate(self) -> Certificate:
        _log.info("verify: one device, twice")
        precision, alone = self._alone()
        again = self._runs.alone(precision)
        plain = self._certificate(precision, alone)
        repeats = unlike(again.record, alone.record)
        bad = not_finite(alone.record)
        if bad:
            facts = (f"on one device {bad}",)
            return replace(plain, repeats=bad, place=Place(axes=None, facts=facts, advice=("a smaller learning rate",)))
        if repeats:
            _log.info("verify: not deterministic; looking for the module")
            return replace(plain, repeats=repeats, place=place_alone(self._runs, precision, repeats))
        _log.info("verify: %s", self._runs.request.mesh)
        try:
            mesh = self._runs.on(AXIS_KEYS, precision)
        except RunError as error:
            _log.info("verify: it fails there; looking for the axis")
            return replace(plain, place=place_of_failure(self._runs, precision, error))
        ground = Ground(
            runs=self._runs,
            precision=precision,
            bounds=self._bounds(precision, alone),
            expected=alone.record,
            unlike_buffers=tuple(alone.facts["statistics"]) if mesh.mesh.data > 1 else (),
        )
        checks = ground.checks(mesh)
        place = None
        if any(check.wrong for check in checks):
            _log.info("verify: not equal; looking for the place")
            place = place_on_mesh(ground, checks)
        never = list(_NEVER)
        if ground.unlike_buffers:
            never.append("running statistics, which are those of the first data rank by design")
        return replace(
            plain,
            checks=tuple(checks),
            bounds=ground.bounds.name,
            plan=mesh.record.plan_hash,
            not_compared=tuple(never),
            place=place,
        )

    def _alone(self) -> tuple[str, Trained]:
        """One device, in fp64 if that is possible."""
        wanted = _WIDE if self._asked == AUTO else self._asked
        try:
            return wanted, self._runs.alone(wanted, watch=True)
        except RunError as error:
            if self._asked != AUTO:
                raise
            last = str(error).strip().splitlines()[-1]
            self._notes.append(f"in fp64 the module fails on one device, so it was run in fp32: {last}")
            return _PLAIN, self._runs.alone(_PLAIN, watch=True)

    def _bounds(self, precision: str, alone: Trained) -> Bounds:
        if precision == _PLAIN:
            return FP32
        if precision == _WIDE:
            narrow = alone.record.watched["narrow"]
            if not narrow:
                return FP64
            name, place = next(iter(narrow.items()))
            where = f"'{place}' computes in {name}"
            return replace(FP32, name=f"fp32, since {where} inside")
        _log.info("verify: one device in fp32, to measure how far %s is off", precision)
        in_fp32 = self._runs.alone(_PLAIN)
        tensor = self._runs.request.mesh.tensor > 1
        # Each rank rounds its summands: a loss that is off by less than one rounding cannot be told from luck.
        least = _BF16_ROUNDING if tensor else 0.0
        return reduced(precision, compare(alone.record, in_fp32.record, EXACT), least_scalar=least)

    def _certificate(self, precision: str, alone: Trained) -> Certificate:
        request, told = self._runs.request, self._runs.told
        if told["left_out"]:
            self._notes.append(
                f"{told['left_out']} samples of each batch were left out, so that all micro-batches have equal size"
            )
        if request.mesh.tensor > 1 and alone.record.watched["draws"]:
            self._notes.append(
                "on the tensor axis random numbers were those of one device (tensor_random=exact); a training with "
                "tensor_random=derived draws others, which are as good but not the same"
            )
        setting = Setting(
            module=told["module"],
            shrunk=tuple(alone.facts["cuts"]),
            parameters=alone.record.elements,
            mesh=str(request.mesh),
            options=_told(self._runs.options_on(AXIS_KEYS)),
            microbatches=self._runs.microbatches,
            steps=(len(alone.record.gradients), request.accumulate),
            precision=precision,
            trainer={name: value for name, value in request.trainer.items() if value is not None},
            seed=request.seed,
        )
        return Certificate(
            setting=setting,
            random=_random(alone.record.watched["draws"]),
            notes=tuple(self._notes),
            versions=_versions(),
        )


def _random(draws: Mapping[str, int]) -> str:
    if not draws:
        return "nothing draws random numbers in training, so no streams were compared"
    places = few_and_more((f"'{name}'" for name in draws), _MOST_PLACES)
    return f"on in {places}; other draws would show in losses and gradients"


def _told(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that differ from their defaults; the stage of ZeRO in any case."""
    return {"zero_stage": options.get("zero_stage", StrategyConfig.zero_stage), **_unusual(options)}


def _unusual(options: Mapping[str, Any]) -> dict[str, Any]:
    default = asdict(StrategyConfig())
    return {name: value for name, value in options.items() if value != default[name]}


def _options(strategy: Any) -> dict[str, Any]:
    if strategy is None:
        return {}
    if isinstance(strategy, Mesh3DStrategy):
        return _unusual(asdict(strategy.config))
    if isinstance(strategy, Mapping):
        StrategyConfig.from_mapping(strategy)
        return dict(strategy)
    raise ConfigError(
        f"strategy is a {type(strategy).__name__}", valid="a Mesh3DStrategy, or a mapping of its options", fix="None"
    )


def _fitting(request: Request) -> tuple[Request, list[str]]:
    """Returns the request without what fits the whole module only, and what there is to say of it."""
    if request.layers is None or request.options.get("layers_per_stage") is None:
        return request, []
    options = {name: value for name, value in request.options.items() if name != "layers_per_stage"}
    return replace(request, options=options), ["layers_per_stage is that of all layers, and was left out"]


def _check(request: Request, precision: str) -> None:
    """Refuses what cannot be run, before a process is started."""
    mesh = request.mesh
    if mesh.world == 1:
        raise ConfigError(
            "the mesh has one rank, which is the reference itself: there is nothing to compare.",
            fix="devices=2, or a degree above 1",
        )
    if precision not in (AUTO, *PRECISIONS):
        close = nearest(precision, (AUTO, *PRECISIONS))
        raise ConfigError(f"precision={precision!r} does not exist.", valid=(AUTO, *PRECISIONS), fix=close)
    for name, value in (("steps", request.steps), ("layers", request.layers)):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} is too small.", valid="an integer of at least 1")
    unknown = [name for name in request.trainer if name not in TRAINER_OPTIONS]
    if unknown:
        raise ConfigError(f"trainer options {', '.join(unknown)} are not taken over.", valid=TRAINER_OPTIONS)


def _modules_of(*made: Any) -> tuple[str, ...]:
    names = (getattr(each, "__module__", None) or type(each).__module__ for each in made if each is not None)
    return tuple(name for name in dict.fromkeys(names) if name not in ("__main__", "builtins"))


def _versions() -> dict[str, str]:
    packages = ("torch", "lightning", "torchmetrics")
    return {
        "lightning_3d": __version__,
        **{name: metadata.version(name) for name in packages},
        "python": platform.python_version(),
    }


def _timed(certificate: Certificate, seconds: float) -> Certificate:
    return replace(certificate, seconds=round(seconds, 1))
