import pickle
from typing import Any

import pytest
from torch import nn

from lightning_3d import errors
from lightning_3d.errors import (
    CheckpointError,
    ConfigError,
    Lightning3DError,
    MeshError,
    few_and_more,
    nearest,
    user_line,
)
from lightning_3d.graph.calls import Call, around_calls
from lightning_3d.reference import language_model


def test_text_is_fact_then_valid_values_then_fix() -> None:
    error = ConfigError("zero_stage=5 does not exist", valid=(0, 1, 2, 3), fix="strategy.zero_stage=3")
    assert str(error) == "zero_stage=5 does not exist\n  valid: 0, 1, 2, 3\n  fix: strategy.zero_stage=3"


@pytest.mark.parametrize(
    ("valid", "text"), [("a multiple of 4", "a multiple of 4"), (8, "8"), (["a", "b"], "a, b"), ({"k": 1}, "k")]
)
def test_valid_values_are_listed(valid: object, text: str) -> None:
    assert str(MeshError("fact", valid=valid)) == f"fact\n  valid: {text}"


def test_text_without_more_to_say_is_the_fact() -> None:
    assert str(Lightning3DError("fact")) == "fact"


def test_the_first_names_are_told_and_how_many_more_there_are() -> None:
    assert few_and_more("abc") == few_and_more(iter("abc"), 3) == "a, b, c"
    assert few_and_more(map(str, range(20)), 2) == "0, 1 and 18 more"


def test_error_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(CheckpointError("gone", valid=["last"], fix="ckpt_path=last")))
    assert type(error) is CheckpointError
    assert (error.fact, error.valid, error.fix) == ("gone", ["last"], "ckpt_path=last")


def test_all_are_one_family_and_of_a_built_in_kind() -> None:
    family = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(family) >= 7
    assert all(issubclass(kind, Lightning3DError) for kind in family)
    assert all(issubclass(kind, (ValueError, RuntimeError)) for kind in family if kind is not Lightning3DError)


@pytest.mark.parametrize(("name", "found"), [("trian", "train"), ("zero_stge", "zero_stage"), ("xyz", None)])
def test_nearest(name: str, found: str | None) -> None:
    assert nearest(name, ["train", "zero_stage", "doctor"]) == found


def test_the_users_line_is_outside_of_torch_this_package_and_generated_code() -> None:
    def here() -> str:
        namespace: dict[str, Any] = {"user_line": user_line}
        exec(compile("def place():\n    return user_line()", "<generated>", "exec"), namespace)
        block = nn.Linear(1, 1)
        block.forward = namespace["place"]
        around_calls(block, Call.__call__)
        return block()

    assert here() == f"{__file__}:{here.__code__.co_firstlineno + 6}"


def test_reference_models_are_a_users() -> None:
    file = language_model.__file__
    namespace: dict[str, Any] = {"user_line": user_line}
    exec(compile("line = user_line()", file, "exec"), namespace)
    assert namespace["line"] == f"{file}:1"
