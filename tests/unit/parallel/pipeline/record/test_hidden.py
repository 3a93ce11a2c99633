from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.modeling_outputs import BaseModelOutput

from lightning_3d.parallel.pipeline.record.hidden import leaves, mapped

Pair = namedtuple("Pair", "one other")
ONE, OTHER = torch.ones(2), torch.zeros(3)
TREES: dict[str, Any] = {
    "a tensor": ONE,
    "nothing": None,
    "empty": ((), [], {}),
    "arguments": ((ONE, 1, "a", None, slice(2)), {"b": OTHER, "a": [ONE, (2.0, {})]}),
    "a size": (torch.Size([2, 3]), ONE),
    "a named tuple": [Pair(ONE, (OTHER, 1))],
    "an ordered dict": OrderedDict(b=ONE, a=[OTHER]),
    "an output of Hugging Face": (BaseModelOutput(last_hidden_state=ONE, hidden_states=(ONE, OTHER)),),
    "a class of the user's": [object, int, Pair],
}


@pytest.mark.parametrize("name", TREES)
def test_parts_are_those_of_a_pytree(name: str) -> None:
    tree = TREES[name]
    expected = pytree.tree_leaves(tree)
    found = leaves(tree)
    assert len(found) == len(expected)
    assert all(one is other for one, other in zip(found, expected, strict=True))
    same = pytree.tree_map(lambda leaf: (leaf,), tree)
    made = mapped(lambda leaf: (leaf,), tree)
    assert type(made) is type(same)
    assert pytree.tree_structure(made) == pytree.tree_structure(same)
    assert all(one is other for one, other in zip(pytree.tree_leaves(made), expected, strict=True))
