from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.parallel.tensor.proof.shrink import (
    fewer_blocks,
    fewer_samples,
    fewer_tokens,
    one_of_each_kind,
    pieces,
    positions,
)


class Block(nn.Module):
    def __init__(self, width: int, index: int) -> None:
        super().__init__()
        self.layer, self.index = nn.Linear(width, width), index


def _model(widths: tuple[int, ...] = (4, 4, 8, 4)) -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList(Block(width, index) for index, width in enumerate(widths))
    model.head = nn.Linear(4, 4)
    return model


def _ids(samples: int = 8, tokens: int = 64) -> Tensor:
    return torch.arange(samples * tokens).view(samples, tokens)


def test_one_block_of_each_kind_stays() -> None:
    assert one_of_each_kind(_model()) == {"blocks": ("blocks.0", "blocks.2")}
    assert one_of_each_kind(_model((4, 8))) == {}


def test_blocks_come_back() -> None:
    model = _model()
    blocks = list(model.blocks)
    with fewer_blocks(model, {"blocks": ("blocks.0", "blocks.2")}):
        assert list(model.blocks) == [blocks[0], blocks[2]]
        assert model.blocks[1] is blocks[2]
    with pytest.raises(KeyError), fewer_blocks(model, {"blocks": ("blocks.3",)}):
        raise KeyError
    assert list(model.blocks) == blocks


def test_named_blocks_keep_their_names() -> None:
    model = nn.Sequential()
    stack = nn.Sequential()
    stack.add_module("a", nn.Linear(4, 4))
    stack.add_module("b", nn.Linear(4, 4))
    model.add_module("stack", stack)
    with fewer_blocks(model, {"stack": ("stack.b",)}):
        assert [name for name, _ in stack.named_children()] == ["b"]
    assert [name for name, _ in stack.named_children()] == ["a", "b"]


def test_fewer_samples() -> None:
    batch = {"ids": _ids(), "weights": torch.ones(8), "scale": torch.ones(()), "names": [str(i) for i in range(8)]}
    (smaller, index) = fewer_samples((batch, 0), 2)
    assert torch.equal(smaller["ids"], _ids()[:2])
    assert smaller["weights"].shape == (2,)
    assert smaller["scale"].shape == ()
    assert smaller["names"] == ["0", "1"]
    assert index == 0
    assert fewer_samples((batch, 0), 8) == (batch, 0)
    assert fewer_samples(("no tensors", 0), 2) == ("no tensors", 0)


def test_fewer_tokens_cut_whatever_is_as_long() -> None:
    batch = {"ids": _ids(), "mask": torch.ones(8, 64, 64), "image": torch.ones(8, 3, 5), "label": torch.ones(8)}
    (smaller,) = fewer_tokens((batch,), 16)
    assert torch.equal(smaller["ids"], _ids()[:, :16])
    assert {name: tuple(value.shape) for name, value in smaller.items()} == {
        "ids": (8, 16),
        "mask": (8, 16, 16),
        "image": (8, 3, 5),
        "label": (8,),
    }
    assert fewer_tokens((torch.ones(8, 64),), 16)[0].shape == (8, 64)


def test_the_smallest_piece_comes_first() -> None:
    found = list(pieces(_model(), (_ids(), 0), 2))
    assert [(str(piece), tuple(piece.args[0].shape)) for piece in found] == [
        ("one block of each kind, few samples and tokens", (2, 16)),
        ("one block of each kind, few samples", (2, 64)),
        ("one block of each kind, the whole batch", (8, 64)),
        ("all blocks, few samples", (2, 64)),
    ]
    assert [bool(piece.kept) for piece in found] == [True, True, True, False]


def test_the_same_piece_does_not_come_twice() -> None:
    assert [str(piece) for piece in pieces(_model((4, 8)), (_ids(2, 8), 0), 2)] == ["all blocks, the whole batch"]


def test_tokens_can_be_cut_over_the_ranks() -> None:
    assert next(pieces(_model(), (_ids(),), 6)).args[0].shape == (2, 18)


def test_positions() -> None:
    assert positions((_ids(2, 16), 0)) == 32
    assert positions((torch.ones(4, 8), 0)) == 4
    assert positions((0,)) == 1
