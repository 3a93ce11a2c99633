"""Blocks that are computed again in backward, with caches that remember whether they were filled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import T5Config, T5ForConditionalGeneration

from lightning_3d.graph.calls import around_calls
from lightning_3d.plan.recompute import block_handler, recomputing


def gradients(kind: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model: Any = T5ForConditionalGeneration(config).double()
    handler = block_handler(None, recomputing(kind))
    for block in (*model.encoder.block, *model.decoder.block):
        if handler is not None:
            around_calls(block, handler)
    ids = torch.randint(0, 32, (2, 5))
    model(input_ids=ids, labels=ids.flip(0)).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_caches_of_decoders_with_two_attentions_are_left_alone(kind: str) -> None:
    expected, found = gradients("none"), gradients(kind)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-12, atol=1e-14)
