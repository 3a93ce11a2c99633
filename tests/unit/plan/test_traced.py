"""What a traced step keeps for backward is what autograd saves in a real one, part by part, for models of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.config.schema import KEPT_KINDS
from lightning_3d.graph.blocks import find_stacks
from lightning_3d.plan.recompute import is_kept, recomputing
from lightning_3d.plan.traced import trace_model
from lightning_3d.reference.gpt import GPT
from lightning_3d.reference.llama import Llama

VOCABULARY, LENGTH, SAMPLES, WIDTH = 61, 16, 2, 32
IDS = torch.arange(SAMPLES * LENGTH).reshape(SAMPLES, LENGTH) % VOCABULARY


class Own(L.LightningModule):
    """Trains any model by a loss."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.model)


def next_token(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())


def gpt() -> Own:
    return Own(GPT(VOCABULARY, WIDTH, 3, 4, max_length=LENGTH, dropout=0.1), next_token)


def llama() -> Own:
    return Own(Llama(VOCABULARY, WIDTH, 48, 3, 4, 2, max_length=LENGTH), next_token)


def gpt2() -> Own:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=3, n_head=4, n_positions=LENGTH, use_cache=False)
    return Own(GPT2LMHeadModel(config), lambda model: model(input_ids=IDS, labels=IDS).loss)


def bert() -> Own:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
    mask = torch.ones_like(IDS)
    return Own(BertForMaskedLM(config), lambda model: model(input_ids=IDS, attention_mask=mask, labels=IDS).loss)


def vit() -> Own:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    images, labels = torch.ones(SAMPLES, 3, 16, 16), torch.tensor([1, 2])
    return Own(ViTForImageClassification(config), lambda model: model(pixel_values=images, labels=labels).loss)


MODELS = (gpt, llama, gpt2, bert, vit)


def really_saved(module: Own, kind: str) -> int:
    """Bytes of all storages that a real forward leaves behind for its backward, parameters left out."""
    parameters = {each.untyped_storage().data_ptr() for each in module.parameters()}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    through = recomputing(kind)
    caches: list[Any] = []
    if through is not None:
        for stack in find_stacks(module):
            for name in stack.blocks:
                _recomputed(module.get_submodule(name), through)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        if kind == "selective":
            with _Outputs(pack) as outputs:
                loss = module.training_step(None, 0)
            caches.append(outputs)
        else:
            loss = module.training_step(None, 0)
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


class _Outputs(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, pack: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pack, self.inside = pack, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if _Inside.depth and is_kept(func):
            self.pack(output)
        return output


class _Inside:
    depth = 0


def _recomputed(block: nn.Module, through: Any) -> None:
    forward = block.forward

    def around(*args: Any, **kwargs: Any) -> Any:
        _Inside.depth += 1
        try:
            return through(lambda a, k: forward(*a, **k), args, kwargs)
        finally:
            _Inside.depth -= 1

    block.forward = around  # type: ignore[method-assign]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("kind", KEPT_KINDS)
def test_traced_bytes_are_those_that_autograd_saves(make: Callable[[], Own], kind: str) -> None:
    traced = trace_model(module := make(), lambda: module.training_step(None, 0))
    assert traced.kept(kind) == really_saved(make(), kind)
