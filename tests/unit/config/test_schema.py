from dataclasses import fields
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import ConfigError


def test_defaults_are_possible() -> None:
    assert StrategyConfig().check() == StrategyConfig()


def test_what_hydra_hands_over_becomes_plain() -> None:
    given = OmegaConf.create({"layers": [2, "${two}"], "plan": {"*.up": "row"}, "two": 2})
    config = StrategyConfig(layers_per_stage=given.layers, tensor_plan=given.plan, pipeline_parallel_size=2).check()
    assert (config.layers_per_stage, config.tensor_plan) == ([2, 2], {"*.up": "row"})
    assert (type(config.layers_per_stage), type(config.tensor_plan)) == (list, dict)


def test_omegaconf_knows_the_types() -> None:
    merged = OmegaConf.merge(OmegaConf.structured(StrategyConfig), {"zero_stage": 3, "num_microbatches": 4})
    assert OmegaConf.to_object(merged) == StrategyConfig(zero_stage=3, num_microbatches=4)


@pytest.mark.parametrize(
    "values",
    [
        {"zero_stage": 0},
        {"zero_stage": 3, "data_replicate_size": 2, "data_parallel_size": 8},
        {"micro_batch_size": 4, "num_microbatches": 2},
        {"process_group_backend": "gloo", "timeout_seconds": 0.5},
        {"compile": True, "replay": False, "start_method": "spawn"},
        {"uneven": "error", "rank_order": "tensor,data,pipeline"},
        {"pipeline_parallel_size": 4, "pipeline_schedule": "dualpipev", "layers_per_stage": [3] * 8},
        {"pipeline_parallel_size": 2, "pipeline_stack": ["encoder.layers", "decoder.layers"]},
    ],
)
def test_possible(values: dict[str, Any]) -> None:
    assert StrategyConfig.from_mapping(values) == StrategyConfig(**values)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"zero_stage": 5}, "zero_stage=5 must be an integer from 0 to 3"),
        ({"zero_stage": True}, "zero_stage=True must be"),
        ({"data_parallel_size": 0}, "data_parallel_size=0 must be an integer of at least 1 or auto"),
        ({"data_parallel_size": "atuo"}, "did you mean auto?"),
        ({"micro_batch_size": "4"}, "micro_batch_size='4' must be an integer of at least 1 or null"),
        ({"pipeline_schedule": "1f1"}, "did you mean 1f1b?"),
        ({"layers_per_stage": []}, "layers_per_stage=\\[\\] must be a list"),
        ({"tensor_plan": {"a": 1}}, "must be a mapping"),
        ({"cpu_offload": 1}, "cpu_offload=1 must be true or false"),
        ({"rank_order": "data,data,tensor"}, "must be data, pipeline, tensor in some order"),
        ({"timeout_seconds": 0}, "timeout_seconds=0 must be a number above 0"),
        ({"zero_stge": 1}, "zero_stge does not exist \\(did you mean zero_stage\\?\\)"),
        ({"data_parallel_size": 6, "data_replicate_size": 4}, "must divide data_parallel_size=6, so one of 1, 2, 3, 6"),
        ({"zero_stage": 0, "data_replicate_size": 2}, "needs shards, so zero_stage 1, 2 or 3"),
        ({"zero_stage": 0, "cpu_offload": True}, "needs shards, so zero_stage 1, 2 or 3"),
        ({"pipeline_schedule": "zbvzerobubble", "stages_per_rank": 1}, "stages_per_rank=1 must be 2 with pipeline_s"),
        ({"pipeline_schedule": "loopedbfs", "stages_per_rank": 1}, "stages_per_rank=1 must be 2 or more with pipeline"),
        ({"stages_per_rank": 2}, "stages_per_rank=2 must be 1 with pipeline_schedule=1f1b"),
        ({"pipeline_parallel_size": 2, "layers_per_stage": [4]}, "layers_per_stage has 1 entries, must have 2"),
        ({"pipeline_stack": ["a", ""]}, "must be a module's name, a list of names or null"),
        ({"compile": True, "tensor_parallel_size": 2, "replay": False}, "needs replay=True"),
        ({"start_method": "threads"}, "must be one of auto, popen, spawn, fork, forkserver"),
        ({"pretrained_strict": False}, "is about pretrained=DIR, which is not given"),
        ({"async_save": True, "save_distributed_checkpoint": False}, "needs save_distributed_checkpoint=True"),
    ],
)
def test_impossible(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        StrategyConfig.from_mapping(values)


def test_every_problem_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        StrategyConfig.from_mapping({"zero_stage": 9, "unit_blocks": 0, "zero": 1})
    assert [name for name in ("zero_stage=9", "unit_blocks=0", "zero does not") if name in str(caught.value)] == [
        "zero_stage=9",
        "unit_blocks=0",
        "zero does not",
    ]


@pytest.mark.parametrize("option", [option.name for option in fields(StrategyConfig)])
def test_no_option_takes_anything(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        StrategyConfig(**{option: object()}).check()


@pytest.mark.parametrize(
    ("values", "stages"),
    [({}, 1), ({"pipeline_schedule": "zbvzerobubble"}, 2), ({"stages_per_rank": 3}, 3)],
)
def test_stages_of_a_rank(values: dict[str, Any], stages: int) -> None:
    assert StrategyConfig(**values).stages_of_a_rank() == stages
