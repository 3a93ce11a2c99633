"""A device that is not the CPU, for machines that have no other: its tensors hold their values on the CPU.

Operations of tensors on different devices fail, as on a real accelerator. One process that has made it keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.graph.on_device import on_device
from lightning_3d.mesh.spec import MeshSpec
from lightning_3d.plan import make_plan
from tests.parity.models import NextToken

NAME = "elsewhere"


def make_accelerator() -> torch.device:
    """Registers the device with torch, which can be done once in a process."""
    _setup_privateuseone_for_python_backend(NAME)  # type: ignore[no-untyped-call]
    return torch.device(NAME, 0)


class Elsewhere(Tensor):
    """A tensor of the device."""

    held: Tensor

    def __new__(cls, held: Tensor) -> Elsewhere:
        options: dict[str, Any] = {"dtype": held.dtype, "device": f"{NAME}:0", "strides": held.stride()}
        return Tensor._make_wrapper_subclass(cls, held.shape, **options)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _computed(func, args, dict(kwargs or {}))


class Accelerator(TorchDispatchMode):
    """Context in which tensors can be made on the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _computed(func, args, dict(kwargs or {}))


def _computed(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    fakes = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
    if fakes:
        mode = fakes[0].fake_mode
        with mode:
            args, kwargs = pytree.tree_map_only(Elsewhere, _without_values, (args, kwargs))
            return func(*args, **kwargs)
    device = kwargs.get("device")
    named = device is not None and torch.device(device).type == NAME
    here = [leaf for leaf in leaves if not isinstance(leaf, Elsewhere) and leaf.dim() > 0]
    there = [leaf for leaf in leaves if isinstance(leaf, Elsewhere)]
    moves = device is not None or func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
    if here and there and not moves:
        raise RuntimeError(f"{func} of tensors on the CPU and on {NAME}")
    if named:
        kwargs["device"] = "cpu"
    args, kwargs = pytree.tree_map_only(Elsewhere, lambda tensor: tensor.held, (args, kwargs))
    found = func(*args, **kwargs)
    if named or (there and device is None):
        return pytree.tree_map_only(Tensor, Elsewhere, found)
    return found


def _without_values(tensor: Elsewhere) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


class Placed(NextToken):
    """Makes a tensor where its module says it is."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + torch.arange(3.0, device=self.device).sum() * 0


def plans(models: Sequence[Callable[[], nn.Module]]) -> None:
    """Plans each model on several meshes, on the CPU and on the accelerator, and says where plans differ."""
    elsewhere = make_accelerator()
    ids = torch.randint(0, 64, (4, 16))
    for make in models:
        module = Placed(make())
        for pipeline, tensor in ((1, 2), (2, 1), (2, 2)):
            mesh = MeshSpec(data=1, pipeline=pipeline, tensor=tensor)
            found = []
            for device in (torch.device("cpu"), elsewhere):
                with Accelerator(), on_device(module, device):
                    batch = (ids.to(device),)
                    step = partial(module.training_step, batch, 0)
                    found.append(str(make_plan(module, mesh, StrategyConfig(), step=step)))
            here = {tensor.device.type for tensor in (*module.parameters(), *module.buffers())}
            same = "the same" if found[0] == found[1] else "another"
            print(f"{type(module.model).__name__}, {mesh}: {same} plan, left on {here}")


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=4, use_cache=False, **sizes))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, use_cache=False))


if __name__ == "__main__":
    plans([llama, gpt2])
