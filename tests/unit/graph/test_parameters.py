from __future__ import annotations

import torch
from torch import nn

from lightning_3d.graph.parameters import parameter_table
from tests.parity.catalog import build


def test_a_tied_parameter_stands_once_with_all_its_names() -> None:
    module = build("HF GPT-2 (tied)")
    table = parameter_table(module)
    assert table.ties == (("model.transformer.wte.weight", "model.lm_head.weight"),)
    assert table.numel == sum(parameter.numel() for parameter in module.parameters())
    assert table.nbytes == 4 * table.numel
    assert [row.name for row in table.rows] == [name for name, _ in module.named_parameters()]
    assert str(table).endswith("1 tied")


def test_frozen_and_narrow_ones() -> None:
    module = nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.Linear(3, 1, dtype=torch.bfloat16))
    table = parameter_table(module)
    assert [(row.name, row.shape, row.requires_grad) for row in table.rows][:2] == [
        ("0.weight", (3, 2), False),
        ("0.bias", (3,), False),
    ]
    assert table.nbytes == 4 * 9 + 2 * 4
    assert "9 frozen" in str(table)
    assert table.ties == ()
