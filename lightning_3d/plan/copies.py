"""Copies of a module that stand beside it, as averages of its weights do: held as their originals are."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.checkpoint.agreement import gather
from lightning_3d.checkpoint.gathering import gather_whole
from lightning_3d.checkpoint.loading import serve_loading
from lightning_3d.errors import ModuleError
from lightning_3d.graph.beside import Beside
from lightning_3d.graph.calls import Call, Handler, around_calls
from lightning_3d.graph.parameters import class_name
from lightning_3d.initial.broadcast import BufferBroadcast, broadcast_module, broadcast_tensors
from lightning_3d.plan.copying import serve_copying
from lightning_3d.plan.stages import StagesOnRank
from lightning_3d.shards.alike import alike, is_part
from lightning_3d.shards.hook_values import Holders

# The module that has a parameter, the parameter's name there, and the parameter.
_Place = tuple[nn.Module, str, Tensor]


class ModuleCopies:
    """The copies of one module: those that were made before it was cut, and those that users make of it later.

    Hooks compute with a copy as with its original. A call of one gathers what it needs, so all ranks must make it.

    Args:
        module: The whole module. From now on it can be copied, whatever becomes of it.
        world: All ranks of the mesh.
        data_group: The data axis.
    """

    def __init__(self, module: nn.Module, world: dist.ProcessGroup, data_group: dist.ProcessGroup) -> None:
        self._module = module
        self._world, self._data_group = world, data_group
        self._stages: StagesOnRank | None = None
        self._holders: Holders | None = None
        self._made: list[tuple[weakref.ref[nn.Module], str]] = []
        # Tensors that were kept beside the module when it was cut, by the collection that keeps them.
        self._kept: dict[int, tuple[Any, list[tuple[Any, str]]]] = {}
        # Identities of the modules that have whole parameters for the duration of a call.
        self._whole: frozenset[int] = frozenset()
        serve_copying(module, "", self._add)

    def cut(self, beside: Beside, stages: StagesOnRank | None, holders: Holders | None) -> None:
        """Cuts the copies that were made before the module was cut, which it is now. A collective.

        Args:
            beside: The copies.
            stages: The pipeline axis, None where its degree is 1.
            holders: Is told where copies are; None where the pipeline degree is 1.

        Raises:
            ModuleError: On every rank: the ranks have made different copies.
        """
        self._stages, self._holders = stages, holders
        serve_loading(self._module)
        if self._world.size() > 1:
            if len(set(gather(self._world, beside.names))) > 1:
                raise ModuleError(
                    f"rank {self._world.rank()} has copies of {beside.names} in its callbacks, others have others.",
                    fix="make averages of the weights on all ranks; each holds its part of them",
                )
            for copied, _ in beside.modules:
                broadcast_module(copied, self._world)
            broadcast_tensors([holder[at] for (holder, at), _ in beside.tensors], self._world)
        for copied, name in beside.modules:
            _cut_like(copied, self._module.get_submodule(name))
            self._add(copied, name)
        for (holder, at), name in beside.tensors:
            original = self._module.get_parameter(name)
            holder[at] = alike(holder[at], original)
            self._kept.setdefault(id(holder), (holder, []))[1].append((at, name))
            if holders is not None:
                holders.follow_tensor(holder[at], original)

    def pairs(self) -> list[list[tuple[Tensor, Tensor]]]:
        """Returns for every copy its parameters and buffers, each with that of the module."""
        originals = dict(chain(self._module.named_parameters(remove_duplicate=False), self._module.named_buffers()))
        found = [
            [
                (tensor, originals[".".join(filter(None, (name, inner)))])
                for inner, tensor in chain(copied.named_parameters(), copied.named_buffers())
            ]
            for reference, name in self._made
            if (copied := reference()) is not None
        ]
        return found + [
            [(holder[at], originals[name]) for at, name in places] for holder, places in self._kept.values()
        ]

    def bring_buffers(self) -> None:
        """Gives every rank the running statistics of copies as the rank has them that counts. A collective."""
        if self._world.size() == 1 or not _has_statistics(self._module):
            return
        found = [(reference(), name) for reference, name in self._made]
        alive = frozenset(number for number, (copied, _) in enumerate(found) if copied is not None)
        reports = gather(self._world, (len(found), alive))
        if len({count for count, _ in reports}) > 1:
            # Some ranks alone have made some, which nobody else waits for.
            return
        for number in sorted(frozenset.intersection(*(numbers for _, numbers in reports))):
            copied, name = found[number]
            assert copied is not None, "it is alive on all ranks"
            self._bring(copied, name)

    def _bring(self, copied: nn.Module, name: str) -> None:
        if self._data_group.size() > 1:
            BufferBroadcast(copied, self._data_group)()
        if self._stages is not None:
            presence = self._stages.presence
            BufferBroadcast(copied, presence.group, lambda inner: presence.source(f"{name}.{inner}".lstrip(".")))()

    def _add(self, copied: nn.Module, name: str) -> None:
        """Serves a copy that is held as its original, which has this name in the module."""
        self._made.append((weakref.ref(copied), name))
        serve_copying(copied, name, self._add)
        serve_loading(copied)
        if self._holders is not None:
            self._holders.follow(copied, self._module.get_submodule(name))
        for inner, part in copied.named_modules():
            around_calls(part, self._gathering(weakref.ref(part), ".".join(filter(None, (name, inner)))))

    # ---- calls of copies ----

    def _gathering(self, reference: weakref.ref[nn.Module], name: str) -> Handler:
        def handler(call: Call) -> Any:
            part = reference()
            assert part is not None, "it is called"
            with self._gathered(part, name):
                return call()

        return handler

    @contextmanager
    def _gathered(self, part: nn.Module, name: str) -> Iterator[None]:
        """Context in which a part of a copy has whole parameters; inside of a larger part it has them already."""
        parts = frozenset(id(inner) for inner in part.modules())
        places = [] if parts <= self._whole else _places(part)
        # Other ranks of a pipeline have other parts of it.
        if self._stages is None and not any(is_part(parameter) for _, _, parameter in places):
            places = []
        if not places:
            yield
            return
        self._check_callable(part)
        self._bring(part, name)
        whole = self._whole_parameters(places)
        before = self._whole
        self._whole = before | parts
        for owner, key, parameter in places:
            setattr(owner, key, whole[id(parameter)])
        try:
            yield
        finally:
            self._whole = before
            for owner, key, parameter in places:
                setattr(owner, key, parameter)

    def _whole_parameters(self, places: Sequence[_Place]) -> dict[int, Tensor]:
        """Whole parameters by the identity of those that are held."""
        held = {id(parameter): parameter for _, _, parameter in places}
        presence = None if self._stages is None else self._stages.presence
        trains = torch.is_grad_enabled()
        made: dict[int, Tensor] = {}
        # A pipeline watches what its containers and hooks ask of torch.
        with torch._C.DisableTorchFunction(), torch.no_grad():
            parts = [parameter.detach() for parameter in held.values()]
            for (key, parameter), whole in zip(held.items(), gather_whole(parts, True, {}, presence), strict=True):
                own = whole.to(parameter.device, copy=not is_part(parameter))
                made[key] = nn.Parameter(own, requires_grad=trains and parameter.requires_grad)
                if made[key].requires_grad:
                    made[key].register_hook(_refuse_gradient)
        return made

    def _check_callable(self, part: nn.Module) -> None:
        if self._stages is not None and self._stages.runs.in_step:
            raise ModuleError(
                f"a step calls a copy of a {class_name(part)} that was made beside the module or after it was cut; the "
                "ranks of a pipeline are in different places of a step, and have no part of it together.",
                fix="make the copy a part of the module in __init__, self.average = copy.deepcopy(self.net), or call "
                "it in a hook, on every rank",
            )


def _cut_like(copied: nn.Module, original: nn.Module) -> None:
    """Cuts a whole copy in place."""
    parameters = dict(original.named_parameters(remove_duplicate=False))
    known: dict[int, Tensor] = {}
    for prefix, part in copied.named_modules():
        for key, whole in list(part._parameters.items()):
            if whole is not None:
                name = f"{prefix}.{key}" if prefix else key
                if id(whole) not in known:
                    known[id(whole)] = alike(whole, parameters[name])
                setattr(part, key, known[id(whole)])


def _places(module: nn.Module) -> list[_Place]:
    return [
        (owner, name, parameter)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    ]


def _has_statistics(module: nn.Module) -> bool:
    return any(part._buffers.keys() - part._non_persistent_buffers_set for part in module.modules())


def _refuse_gradient(gradient: Tensor) -> NoReturn:
    raise ModuleError(
        "a gradient has come to a parameter of a copy that stands beside the module; nothing would train it.",
        fix="call it under torch.no_grad(), or requires_grad_(False) it",
    )
