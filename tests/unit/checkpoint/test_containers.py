"""Values as plain containers and back."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import io
import logging
import pathlib
import uuid
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import nn

from lightning_3d.checkpoint.containers import from_plain, to_plain
from lightning_3d.errors import CheckpointError


class Colour(enum.Enum):
    RED = "red"
    POINT = (1, 2)


class Level(enum.IntEnum):
    HIGH = 3


class Name(str):
    __slots__ = ()


class Pair(NamedTuple):
    left: int
    right: pathlib.Path


@dataclasses.dataclass
class Settings:
    width: int
    where: pathlib.Path


class Callable:
    def __call__(self) -> None: ...


def through_file(value: Any) -> Any:
    """What a reader gets that loads plain data alone."""
    plain = to_plain(value)
    buffer = io.BytesIO()
    torch.save({"value": plain.value, "notes": plain.notes}, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=True)
    return from_plain(loaded["value"], loaded["notes"])


SAME = [
    None,
    True,
    3,
    2.5,
    1 + 2j,
    "text",
    b"bytes",
    torch.float16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    {"a": [1, (2, {3})], 4: {}, (1, 2): "x", None: 0},
    pathlib.Path("a/b"),
    [pathlib.Path("a"), (pathlib.Path("b"), 1)],
    {pathlib.Path("a"), pathlib.Path("b")},
    frozenset({1, 2}),
    collections.OrderedDict([("b", 1), ("a", pathlib.Path("c"))]),
    collections.deque([1, 2], maxlen=4),
    range(2, 9, 3),
    datetime.datetime(2024, 5, 6, 7, 8, 9, tzinfo=datetime.timezone.utc),
    datetime.date(2024, 5, 6),
    datetime.time(7, 8),
    datetime.timedelta(days=-3, microseconds=1),
    decimal.Decimal("0.1"),
    uuid.UUID(int=5),
    argparse.Namespace(lr=0.1, where=pathlib.Path("x")),
    AttributeDict({"lr": 0.1}),
    DictConfig,
    ListConfig,
    np.float64(0.5),
    np.int32(7),
    np.bool_(True),
]


@pytest.mark.parametrize("value", SAME, ids=[f"{type(value).__name__}{index}" for index, value in enumerate(SAME)])
def test_comes_back_the_same(value: Any) -> None:
    back = through_file(value)
    assert back == value
    assert type(back) is type(value)


def test_defaultdict_keeps_a_builtin_factory_and_no_other() -> None:
    back = through_file(collections.defaultdict(list, a=[1]))
    assert back == {"a": [1]}
    assert back["new"] == []
    assert through_file(collections.defaultdict(lambda: 1, a=1)).default_factory is None


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(2, 3), np.float32(3) * np.ones(()), np.zeros((0, 2), bool)])
def test_arrays_come_back(array: Any) -> None:
    back = through_file({"a": np.asarray(array)})["a"]
    assert isinstance(back, np.ndarray)
    assert back.dtype == array.dtype
    assert np.array_equal(back, array)


def test_tensors_are_whole_and_bring_no_storage_along() -> None:
    big = torch.arange(10_000.0)
    plain = to_plain({"view": big[3:5], "parameter": nn.Parameter(torch.ones(2))}).value
    assert torch.equal(plain["view"], big[3:5])
    assert plain["view"].untyped_storage().nbytes() == 8
    assert not plain["parameter"].requires_grad


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Colour.RED, "red"),
        (Colour.POINT, "POINT"),
        (Level.HIGH, 3),
        (Name("x"), "x"),
        ({Colour.RED: 1, pathlib.Path("p"): 2}, {"red": 1, "p": 2}),
        (Pair(1, pathlib.Path("p")), (1, pathlib.Path("p"))),
        (Settings(3, pathlib.Path("p")), {"width": 3, "where": pathlib.Path("p")}),
        (nn.functional.relu, {"_target_": "hydra.utils.get_object", "path": "torch.nn.functional.relu"}),
        (nn.GELU, {"_target_": "hydra.utils.get_object", "path": "torch.nn.modules.activation.GELU"}),
        (
            functools.partial(torch.optim.AdamW, lr=0.1),
            {"_target_": "torch.optim.adamw.AdamW", "_partial_": True, "lr": 0.1},
        ),
    ],
)
def test_stays_plain(value: Any, expected: Any) -> None:
    back = through_file(value)
    assert back == expected
    assert type(back) is type(expected)


def test_a_partial_becomes_what_hydra_instantiates() -> None:
    from hydra.utils import instantiate

    value = functools.partial(torch.optim.SGD, lr=0.5)
    again = instantiate(through_file(value))
    assert (again.func, again.keywords) == (torch.optim.SGD, {"lr": 0.5})
    assert instantiate(through_file(nn.functional.relu)) is nn.functional.relu


def test_configs_keep_interpolations_that_they_can_resolve_themselves() -> None:
    config = OmegaConf.create({"lr": 0.1, "model": {"lr": "${lr}", "sizes": [1, 2]}, "missing": "???"})
    whole = through_file({"hyper_parameters": config})["hyper_parameters"]
    assert isinstance(whole, DictConfig)
    assert whole == config
    assert OmegaConf.to_container(whole)["model"]["lr"] == "${lr}"
    part = through_file(config.model)
    assert isinstance(part.sizes, ListConfig)
    assert part == {"lr": 0.1, "sizes": [1, 2]}


def test_an_interpolation_that_cannot_be_resolved_stays() -> None:
    config = OmegaConf.create({"part": {"x": "${nowhere}", "path": pathlib.Path("p")}})
    back = through_file({"part": config.part})["part"]
    assert OmegaConf.to_container(back) == {"x": "${nowhere}", "path": pathlib.Path("p")}


@pytest.mark.parametrize("value", [io.BytesIO(), lambda: None, Callable(), np.array(["a"]), np.array([object()])])
def test_everything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^hyper_parameters\.model\.0\.x is a ") as caught:
        to_plain({"hyper_parameters": {"model": [{"x": value}]}})
    assert "save_hyperparameters(ignore=['x'])" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"^callbacks\.x is a ") as caught:
        to_plain({"x": value}, "callbacks")
    assert "save_hyperparameters" not in str(caught.value)


def test_modules_are_left_out_of_hyperparameters_only(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert to_plain({"hyper_parameters": {"my_net": nn.Linear(1, 1), "lr": 1}}).value == {
                "hyper_parameters": {"my_net": None, "lr": 1}
            }
    # Not at each checkpoint.
    assert caplog.text.count("save_hyperparameters(ignore=['my_net'])") == 1
    with pytest.raises(CheckpointError, match=r"callbacks\.net is a torch\.nn\.modules\.linear\.Linear"):
        to_plain({"callbacks": {"net": nn.Linear(1, 1)}})


def test_the_original_is_not_changed() -> None:
    value = {"a": [pathlib.Path("x"), {"b": (1, 2)}], "c": argparse.Namespace(d=1)}
    copy = {"a": [pathlib.Path("x"), {"b": (1, 2)}], "c": argparse.Namespace(d=1)}
    to_plain(value)
    assert value == copy


def test_unknown_notes_leave_the_value_plain() -> None:
    assert from_plain({"a": 1}, [(("a",), "of the future", None), (("b", 0), "path", None)]) == {"a": 1}
    assert from_plain({"a": None}, [(("a",), "type", "os.system")]) == {"a": None}
