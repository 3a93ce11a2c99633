import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from lightning_3d.config.compose import told_plainly
from lightning_3d.errors import ConfigError
from lightning_3d.reference.gpt import GPT
from lightning_3d.strategy.launch.launcher import Mesh3DLauncher
from lightning_3d.train.job import _launch_as_hydra_wants


def test_lightnings_strategies_get_the_launcher_that_knows_sweeps() -> None:
    strategy = DDPStrategy()
    strategy._launcher = _SubprocessScriptLauncher(LightningEnvironment(), num_processes=2, num_nodes=1)
    _launch_as_hydra_wants(strategy)
    assert isinstance(strategy.launcher, Mesh3DLauncher)
    assert (strategy.launcher.num_processes, strategy.launcher.num_nodes) == (2, 1)


def test_a_strategy_without_a_launcher_keeps_none() -> None:
    strategy = SingleDeviceStrategy("cpu")
    _launch_as_hydra_wants(strategy)
    assert strategy.launcher is None


def test_refusals_of_the_reference_come_without_a_traceback() -> None:
    with pytest.raises(ConfigError, match="num_heads"), told_plainly():
        GPT(vocab_size=8, hidden_size=9, num_layers=1, num_heads=2, max_length=4)
    with pytest.raises(ValueError, match="somebody's own") as caught, told_plainly():
        raise ValueError("somebody's own")
    assert type(caught.value) is ValueError
