import pytest
from omegaconf import OmegaConf

from lightning_3d.config.devices import asked_devices, smallest_world
from lightning_3d.config.schema import StrategyConfig
from lightning_3d.errors import ConfigError


@pytest.mark.parametrize(
    ("devices", "count"),
    [
        (2, 2),
        ("4", 4),
        ("0,1", 2),
        ([0, 3, 5], 3),
        (OmegaConf.create([1]), 1),
        ("auto", None),
        (-1, None),
        ("-1", None),
    ],
)
def test_every_form_of_devices_is_read(devices: object, count: int | None) -> None:
    assert asked_devices(devices) == count


@pytest.mark.parametrize("devices", [0, -2, "two", "", [], True, None])
def test_other_forms_are_refused(devices: object) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.devices=.* names no device"):
        asked_devices(devices)


def test_the_smallest_world_is_that_of_the_degrees() -> None:
    options = StrategyConfig(pipeline_parallel_size=2, tensor_parallel_size=3, data_replicate_size=2)
    assert smallest_world(options) == 12
    assert smallest_world(options, 2) == 24
    options.data_parallel_size = 4
    assert smallest_world(options, 2) == 24
