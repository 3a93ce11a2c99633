"""The verb ``plan``: which mesh, why, how much memory and time; estimates, not measurements."""

from __future__ import annotations

import json
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_3d.errors import BatchError, ConfigError, MeshError
from lightning_3d.planner.article import Look, look_at
from lightning_3d.planner.decoder import decoder_model
from lightning_3d.planner.model import ModelGraph, total_parameters
from lightning_3d.planner.paste import overrides, undivided
from lightning_3d.planner.picture import save_picture
from lightning_3d.planner.prediction import ESTIMATE, Prediction
from lightning_3d.planner.pricing import Pricer
from lightning_3d.planner.request import Request, read_request
from lightning_3d.planner.search import Found, search
from lightning_3d.planner.steps import Rule, apply_rule
from lightning_3d.planner.traffic import step_traffic
from lightning_3d.planner.trial import Trials, run_trials
from lightning_3d.units import counted, format_count

# Sums in another order.
_ROUNDING = 1e-9

# From a configuration to the model of its module, for modules that are no reference decoders.
Trace = Callable[[DictConfig], ModelGraph]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the planner answers.

    Attributes:
        request: What it was asked.
        parameters: Elements of the model's parameters.
        found: What the search found; None if it was not asked for.
        rule: The rule of thumb, applied.
        look: The given mesh, looked at; None if there is none.
        rank: Place of the given mesh among those of the search that fit; None without both.
        problem: Why the given mesh is impossible.
        traffic: What a rank sends on the given mesh, or on the best one.
        trials: Real steps of the best meshes, or of the given one; None if they were not asked for.
        calibrated: The meshes of the trials, priced again with what they have measured.
    """

    request: Request
    parameters: int
    found: Found | None = None
    rule: Rule | None = None
    look: Look | None = None
    rank: int | None = None
    problem: str = ""
    traffic: str = ""
    trials: Trials | None = None
    calibrated: tuple[Prediction, ...] = ()

    @property
    def place(self) -> str:
        """Where the given mesh stands among those of the search: ``place 3 of 214 that fit, 4.0% slower than ...``."""
        if self.problem:
            return f"impossible: {self.problem}"
        if self.look is None or self.found is None:
            return ""
        given, times = self.look.given, self.found.times
        if not given.fits or self.rank is None:
            return given.verdict
        if self.rank == 1:
            return f"place 1 of {len(times)} that fit"
        return f"place {self.rank} of {len(times)} that fit, {self.slower:.1%} slower than the best"

    @property
    def slower(self) -> float | None:
        """Share by which a step of the given mesh takes longer than one of the best; None without both."""
        if self.rank is None or self.look is None or self.found is None:
            return None
        return self.look.given.step_seconds / self.found.times[0] - 1

    def __str__(self) -> str:
        request = self.request
        cluster = request.cluster
        parts = [
            f"plan of {request.name} on {counted(request.devices, 'device')}: {cluster.name}, "
            f"{counted(cluster.nodes, 'node')} of {cluster.devices_per_node} {cluster.device}   [{ESTIMATE}]\n"
            f"{format_count(self.parameters)} parameters, {request.space.global_size} samples in a step, "
            f"{request.bytes_recipe}"
        ]
        if request.trainer_devices not in (None, request.devices):
            asked = request.trainer_devices
            parts[0] += f"\ntrainer.devices x trainer.num_nodes is {asked}, which num_devices={asked} would plan for"
        if self.place:
            parts[0] += f"\nthe mesh of {request.name} as it is: {self.place}"
        if self.rule is not None:
            parts.append(f"A rule of thumb in five steps\n{self.rule}")
        if self.found is not None:
            parts.append(_found_text(self.found, request))
        if self.look is not None:
            parts.append(f"The mesh as given{f': {self.place}' if self.place else ''}\n{self.look}")
            tensor = self.look.given.mesh.tensor_parallel_size
            if request.shape and undivided(request, tensor) and not request.pads_vocabulary:
                parts[-1] += (
                    f"\n    {tensor} tensor ranks do not divide the vocabulary of {request.shape.vocab}: without "
                    "strategy.pad_vocabulary=true embedding and head are whole on each, which is not counted here"
                )
        if self.traffic:
            parts.append(f"What a rank sends in a step\n{self.traffic}")
        if self.trials is not None:
            parts.append(str(self.trials))
            parts += [f"{place}) {one}" for place, one in enumerate(self.calibrated, 1)]
        return "\n\n".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Returns everything as plain containers."""
        found, rule = self.found, self.rule
        return {
            "name": self.request.name,
            "estimate": ESTIMATE,
            "cluster": self.request.cluster.name,
            "devices": self.request.devices,
            "parameters": self.parameters,
            "global_size": self.request.space.global_size,
            "steps": [
                {"question": step.question, "number": step.number, "decision": step.decision}
                for step in (rule.steps if rule else ())
            ],
            "readings": [
                {"name": one.name, "verdict": one.verdict, "mesh": one.mesh and one.mesh.as_dict()}
                for one in (rule.readings if rule else ())
            ],
            "best": [
                {**one.as_dict(), "overrides": overrides(one, self.request)} for one in (found.best if found else ())
            ],
            "rejected": [{"mesh": one.mesh, "reason": one.reason} for one in (found.rejected if found else ())],
            "searched": found and {"priced": found.priced, "fitting": len(found.times), "seconds": found.seconds},
            "rank": self.rank,
            "slower": self.slower,
            "problem": self.problem or None,
            "given": self.look and self.look.given.as_dict(),
            "trials": self.trials and self.trials.as_dict(),
            "calibrated": [one.as_dict() for one in self.calibrated],
            "facts": list(self.look.facts) if self.look else [],
            "claims": [
                {"said": one.said, "found": one.found, "holds": one.holds}
                for one in (self.look.claims if self.look else ())
            ],
        }


def run(cfg: DictConfig, words: Sequence[str], directory: Path | None, *, trace: Trace | None = None) -> int:
    """Plans as a command line asks, and prints the answer.

    Args:
        cfg: The composed configuration, of ``plan.yaml``.
        words: The overrides that it was composed from; trials are trained with them.
        directory: The user's own directory of configuration.
        trace: Makes the model of a module that is no reference decoder.

    Returns:
        0 if a mesh was found or priced, 1 if nothing fits.

    Raises:
        Lightning3DError: The configuration is impossible.
    """
    answer = plan(cfg, trace=trace)
    shown = answer.found.best if answer.found else ()
    # Where nothing fits there is nothing to try, and the answer says so.
    if cfg.trial and (answer.found is None or shown):
        answer = _tried(answer, cfg, words, directory)
    print(json.dumps(answer.as_dict(), indent=2) if cfg.json else answer)
    given = answer.look.given if answer.look else None
    if answer.request.picture and (shown or given):
        save_picture(answer.request.picture, shown, given=given, title=answer.request.name)
        print(f"\npicture {answer.request.picture}", file=sys.stderr if cfg.json else sys.stdout)
    return 0 if answer.found is None or shown else 1


def plan(cfg: DictConfig, *, trace: Trace | None = None) -> Answer:
    """Returns the planner's answer to a composed configuration.

    Args:
        cfg: The configuration, of ``plan.yaml``.
        trace: Makes the model of a module that is no reference decoder.

    Raises:
        Lightning3DError: The configuration is impossible.
    """
    request = read_request(cfg)
    if request.shape is not None:
        model: ModelGraph = decoder_model(request.shape)
    elif trace is not None:
        model = trace(cfg)
    else:
        raise ConfigError(
            f"the model of {request.name} is no reference decoder, and nothing here can trace it.",
            valid="lightning_3d.reference.gpt.GPT, lightning_3d.reference.llama.Llama",
        )
    pricer = Pricer(model, request.cluster, request.bytes_recipe)
    parameters = total_parameters(model)
    if request.evaluate:
        assert request.given is not None, "the request was checked"
        traffic = str(step_traffic(pricer.shared, request.given))
        return Answer(request=request, parameters=parameters, look=look_at(pricer, request.given), traffic=traffic)
    found = search(pricer, request.devices, request.space, top=max(request.top, request.trial))
    rule = apply_rule(pricer, request.devices, request.space, found)
    look, problem = _look_if_possible(pricer, request)
    rank = None
    if look is not None and look.given.fits and found.times:
        rank = bisect_left(found.times, look.given.step_seconds * (1 - _ROUNDING)) + 1
    return Answer(request=request, parameters=parameters, found=found, rule=rule, look=look, rank=rank, problem=problem)


def _tried(answer: Answer, cfg: DictConfig, words: Sequence[str], directory: Path | None) -> Answer:
    """The answer with real steps of the best meshes, and their prices calibrated by them."""
    request = answer.request
    if answer.found is not None:
        asked = answer.found.best[: request.trial]
    else:
        asked = (answer.look.given,) if answer.look is not None else ()
    trials = run_trials(asked, request, cfg, words, directory)
    calibrated = tuple(one.scaled(trials.scale / request.cluster.time_scale) for one in asked)
    return replace(answer, trials=trials, calibrated=calibrated)


def _look_if_possible(pricer: Pricer, request: Request) -> tuple[Look | None, str]:
    """The given mesh, or why there is none: the search answers all the same."""
    if request.problem is not None:
        return None, request.problem.fact
    if request.given is None:
        return None, ""
    try:
        return look_at(pricer, request.given), ""
    except (MeshError, BatchError) as error:
        return None, error.fact


def _found_text(found: Found, request: Request) -> str:
    head = f"Best of {found.priced} meshes priced in {found.seconds:.2f} s, of which {len(found.times)} fit"
    lines = [head]
    for place, one in enumerate(found.best, 1):
        lines += [f"{place}) {one}", f"  paste: {overrides(one, request)}"]
    if not found.best:
        lines.append("nothing fits; what needs least:")
        lines.append(str(found.closest) if found.closest is not None else "no mesh divides devices, heads and batch")
    if found.rejected:
        lines.append("Rejected")
        lines += [f"  {one.mesh}: {one.reason}" for one in found.rejected]
    return "\n".join(lines)
