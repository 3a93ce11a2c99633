import copy

import pytest
from torch import nn

from lightning_3d.graph.copies import unused_copies
from lightning_3d.graph.parameters import parameter_table


class Pair(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        self.second = nn.Linear(width, 2)


class Learner(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.model = Pair()
        self.other = other


def found(module: nn.Module, *used: str) -> dict[str, str]:
    table = parameter_table(module)
    names = [row.name for row in table.rows if row.name.startswith(used)]
    return unused_copies(module, table, names)


def test_the_outermost_copy_follows_its_original() -> None:
    module = Learner(Pair())
    names = ("first.0.weight", "first.0.bias", "second.weight", "second.bias")
    assert found(module, "model.") == {f"other.{name}": f"model.{name}" for name in names}


def test_every_copy_follows() -> None:
    copies = found(Learner(nn.ModuleDict({"slow": Pair(), "slower": Pair()})), "model.")
    assert copies["other.slow.second.bias"] == copies["other.slower.second.bias"] == "model.second.bias"


@pytest.mark.parametrize(
    "other",
    [Pair(8), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), nn.Linear(4, 4)],
    ids=["other shapes", "another class", "a single layer"],
)
def test_what_is_no_copy_has_no_original(other: nn.Module) -> None:
    assert not found(Learner(other), "model.")


def test_of_what_is_used_in_part_only_the_rest_is_a_copy() -> None:
    copies = found(Learner(Pair()), "model.", "other.second.bias")
    assert copies == {f"other.first.0.{name}": f"model.first.0.{name}" for name in ("weight", "bias")}


def test_ties_inside_go_by_first_names() -> None:
    module = Learner(nn.Identity())
    module.model.second = nn.Linear(4, 4)
    module.model.second.weight = module.model.first[0].weight  # type: ignore[index]
    module.other = copy.deepcopy(module.model)
    copies = found(module, "model.")
    assert copies["other.first.0.weight"] == "model.first.0.weight"
    assert "other.second.weight" not in copies
