from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchmetrics.functional import accuracy

from lightning_3d.errors import ModuleError
from tests.unit.graph.stacked import CLASSES, WIDTH, Block, Listener, Reads, Stacked, Watcher, run


def test_a_value_that_nobody_lets_pass_is_an_error_with_its_line() -> None:
    module = Reads(lambda logits: logits.sum().item())
    with pytest.raises(ModuleError, match=r"item in the step \(.*test_values.py:\d+\) reads values") as caught:
        run(module)
    assert "torch.where" in str(caught.value)


def test_the_innermost_module_and_its_call_are_told() -> None:
    class Router(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[(x > 0).any(-1).nonzero()[:, 0]]

    module = Stacked([Block(0), Block(1)])
    module.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), Router(), nn.Linear(WIDTH, CLASSES))
    listener = Listener()
    run(module, listener)
    (read,) = listener.reads
    assert (read.function, read.module) == ("nonzero", "head.1")
    assert "test_values.py" in read.line
    assert read.call is not None
    assert read.call.args[0].shape == (4, WIDTH)


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda logits: logits.sum().item(), 1.0),
        (lambda logits: int(logits.argmax()), 1),
        (lambda logits: bool((logits > 0).all()), False),
        (lambda logits: logits.argmax(-1).tolist(), [1, 1, 1, 1]),
        (lambda logits: logits.detach().numpy().shape, (4, CLASSES)),
        (lambda logits: logits[logits > 0].shape, (4 * CLASSES,)),
        (lambda logits: (logits > 0).nonzero().shape, (4 * CLASSES, 2)),
        (lambda logits: float(accuracy(logits, torch.zeros(4, dtype=torch.long), "multiclass", num_classes=5)), 1.0),
    ],
    ids=["item", "int", "bool", "tolist", "numpy", "mask", "nonzero", "accuracy"],
)
def test_made_up_values(read: Callable[[Tensor], Any], expected: Any) -> None:
    watcher, listener = Watcher(), Listener()
    run(Reads(read), watcher, listener)
    assert watcher.outputs == [expected]
    assert listener.reads


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda logits: bool(logits.isnan().any()), False),
        (lambda logits: bool(torch.isfinite(logits).all()), True),
        (lambda logits: logits[torch.tensor([True, False, True, True])].shape, (3, CLASSES)),
        (lambda logits: logits.masked_select(torch.arange(4)[:, None] < 2).shape, (2 * CLASSES,)),
    ],
    ids=["nan", "finite", "mask of the batch", "masked_select"],
)
def test_what_reads_no_hidden_value(read: Callable[[Tensor], Any], expected: Any) -> None:
    watcher = Watcher()
    run(Reads(read), watcher)
    assert watcher.outputs == [expected]


def test_operators_without_a_fake_form_are_named() -> None:
    @torch.library.custom_op("lightning_3d_tests::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    with pytest.raises(ModuleError, match="lightning_3d_tests"):
        run(Reads(doubled))
