"""A cluster that was measured: its file is read back, and predictions of its parts are what was measured."""

from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lightning_3d.config.compose import compose_run
from lightning_3d.errors import ConfigError
from lightning_3d.planner import Cluster, Level, cluster_text, load_cluster, measured_cluster
from lightning_3d.planner.constants import FITTED
from lightning_3d.planner.recipes import byte_recipe
from lightning_3d.planner.request import read_request
from lightning_3d.planner.software import THIS_LIBRARY
from lightning_3d.planner.speed import Group, Speed

LEVELS = (
    Level(name="node", bandwidth=1.234e9, latency=87e-6, devices=4),
    Level(name="network", bandwidth=0.3e9, latency=210e-6),
)


def measured(**changed: float) -> Cluster:
    figures = {"memory": 6.5e9, "memory_bandwidth": 9.87e9, **changed}
    return measured_cluster(
        name="here", device="CPU: a core", nodes=2, matmul_flops={"bf16": 51e9, "fp32": 51e9}, levels=LEVELS, **figures
    )


def speed_of(cluster: Cluster) -> Speed:
    return Speed(cluster=cluster, recipe=byte_recipe("fp32"), software=THIS_LIBRARY, constants=FITTED)


def test_predictions_of_its_parts_are_what_was_measured() -> None:
    speed = speed_of(measured())
    assert speed.bandwidth(Group(size=4, stride=1)) == pytest.approx(1.234e9)
    assert speed.bandwidth(Group(size=2, stride=4)) == pytest.approx(0.3e9)
    assert speed.peak * speed.cluster.matmul_efficiency == 51e9
    # Nothing to send: what is left is the latency.
    assert speed.ring(Group(size=4, stride=1), 1e-9) == pytest.approx(87e-6)


@pytest.mark.parametrize("name", ["a100_x8", "cpu", "workstation"])
def test_a_file_says_what_the_cluster_is(name: str) -> None:
    values = OmegaConf.to_container(OmegaConf.create(cluster_text(load_cluster(name))))
    assert isinstance(values, dict)
    assert Cluster.from_mapping({str(key): value for key, value in values.items()}) == load_cluster(name)


def test_a_user_plans_with_a_file_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    cluster = measured()
    (tmp_path / "cluster" / "here.yaml").write_text(cluster_text(cluster))
    request = read_request(compose_run(["cluster=here"], config_name="plan", config_dir=tmp_path))
    assert (request.cluster.name, request.devices, request.cluster.device) == ("here", 8, "CPU: a core")
    assert request.cluster.levels[0].bandwidth == pytest.approx(cluster.levels[0].bandwidth, rel=1e-3)
    assert replace(request.cluster, levels=cluster.levels) == cluster


def test_what_cannot_have_been_measured() -> None:
    with pytest.raises(ConfigError, match="memory_bandwidth=0"):
        measured(memory_bandwidth=0)


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["+cluster.memories=3"], r"cluster cpu: memories does not exist \(did you mean memory\?\)\."),
        (["+cluster.xyz=3"], r"cluster cpu: xyz does not exist\."),
        (["~cluster.memory"], r"cluster cpu: memory is missing\."),
        (
            ["+cluster.levels.node.bandwith=3", "~cluster.levels.node.bandwidth"],
            r"levels\.node: bandwith does not exist \(did you mean bandwidth\?\), bandwidth is missing\.",
        ),
        (["+cluster.levels.node.name=here"], r"levels\.node: name does not exist\."),
    ],
)
def test_keys_of_a_file(words: list[str], fact: str) -> None:
    with pytest.raises(ConfigError, match=fact):
        read_request(compose_run(words, config_name="plan"))
