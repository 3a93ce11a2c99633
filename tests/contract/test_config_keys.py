"""One vocabulary: the options of the strategy in the schema, in Python, in YAML; and every file composes."""

import inspect
from dataclasses import fields

import pytest
from omegaconf import OmegaConf

from lightning_3d import Mesh3DStrategy
from lightning_3d.config.compose import compose_run
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.config.search import conf_dir, recipe_files

OPTIONS = {option.name: option.default for option in fields(StrategyConfig)}
CHOICES = sorted(
    f"{path.parent.name}={path.stem}" for path in conf_dir().glob("*/*.yaml") if path.parent.name != "hydra"
)


def test_the_strategy_takes_the_options_of_the_schema() -> None:
    parameters = inspect.signature(Mesh3DStrategy).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == OPTIONS


def test_the_default_strategy_lists_every_option_with_its_default() -> None:
    written = {name: value for name, value in compose_run().strategy.items() if not name.startswith("_")}
    assert written == OPTIONS
    assert list(written) == list(OPTIONS)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_group_composes(choice: str) -> None:
    group = choice.partition("=")[0]
    assert group in compose_run([choice])


@pytest.mark.parametrize("recipe", recipe_files())
def test_every_recipe_composes(recipe: str) -> None:
    cfg = compose_run([f"recipe={recipe}"])
    assert cfg.task_name == recipe
    StrategyConfig.from_mapping({name: value for name, value in cfg.strategy.items() if not name.startswith("_")})


@pytest.mark.parametrize("recipe", recipe_files())
def test_a_recipe_chooses_its_mesh_by_preset_alone(recipe: str) -> None:
    written = OmegaConf.load(recipe_files()[recipe])
    assert "strategy" not in written
    assert "_self_" not in written.defaults or written.defaults[-1] == "_self_"


@pytest.mark.parametrize("recipe", recipe_files())
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["strategy=zero3"], {"zero_stage": 3, "data_replicate_size": 1}),
        (["strategy=hybrid"], {"zero_stage": 3, "data_replicate_size": 2}),
        (["strategy.zero_stage=2"], {"zero_stage": 2}),
        (["strategy=pipeline"], {"pipeline_parallel_size": 2, "tensor_parallel_size": 1, "zero_stage": 1}),
        (
            ["strategy=3d", "strategy.pipeline_schedule=gpipe"],
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_schedule": "gpipe"},
        ),
        (["strategy=zero3", "strategy.data_parallel_size=4"], {"zero_stage": 3, "data_parallel_size": 4}),
    ],
)
def test_the_command_line_wins_over_a_recipe(recipe: str, overrides: list[str], expected: dict[str, object]) -> None:
    strategy = compose_run([f"recipe={recipe}", *overrides]).strategy
    assert {name: strategy[name] for name in expected} == expected


def test_the_recipe_wins_over_the_groups() -> None:
    assert compose_run(["recipe=demo", "model=llama"]).model.model.hidden_size == 128
    assert compose_run(["recipe=demo"]).trainer.max_steps != compose_run().trainer.max_steps


def test_a_micro_batch_size_reaches_the_strategy() -> None:
    assert compose_run(["batch.micro_size=4"]).strategy.micro_batch_size == 4
