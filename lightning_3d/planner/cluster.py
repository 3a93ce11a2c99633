"""A cluster as data: devices, their memory and speed, and what joins them, level by level."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf

from lightning_3d.config.rules import did_you_mean
from lightning_3d.config.search import conf_dir
from lightning_3d.errors import ConfigError, nearest
from lightning_3d.planner.constants import FITTED


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """What joins devices: the links inside a node, the network between nodes, a network above that.

    Attributes:
        name: How it is called in reports.
        bandwidth: Bytes per second that a device sends through it, in one direction; where devices share a link, the
            share of one.
        latency: Seconds until the first byte arrives.
        devices: Devices that it joins; None: all.
    """

    name: str
    bandwidth: float
    latency: float
    devices: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal devices in equal nodes.

    Attributes:
        name: How it is called.
        device: The device.
        memory: Bytes of a device's memory.
        memory_bandwidth: Bytes per second of a device's memory.
        peak_flops: Operations per second of matrix products, by dtype: "bf16", "fp32", "fp64".
        matmul_efficiency: Share of the peak that large products reach.
        levels: What joins the devices, the innermost first.
        nodes: Number of nodes.
        reserved: Bytes of a device that no tensor gets: what its process or driver has. None: as measured on GPUs.
        time_scale: What all times are multiplied with: measured over predicted steps, as ``plan trial=3`` finds it.
        time_band: How far, as a share, nine of ten published step times were from the prediction for this kind of
            device.
        source: Where the figures come from.

    Raises:
        ConfigError: A figure is missing or not positive, or the levels do not grow.
    """

    name: str
    device: str
    memory: float
    memory_bandwidth: float
    peak_flops: Mapping[str, float]
    levels: tuple[Level, ...]
    nodes: int = 1
    matmul_efficiency: float = 0.7
    reserved: float | None = None
    time_scale: float = 1.0
    time_band: float = 0.4
    source: str = ""

    def __post_init__(self) -> None:
        names = ("memory", "memory_bandwidth", "nodes", "matmul_efficiency", "time_scale")
        positive = {name: getattr(self, name) for name in names}
        positive |= {f"levels.{one.name}.bandwidth": one.bandwidth for one in self.levels}
        positive |= {f"peak_flops.{dtype}": value for dtype, value in self.peak_flops.items()}
        for name, value in positive.items():
            if not value > 0:
                raise ConfigError(f"cluster {self.name}: {name}={value!r} is not positive.")
        if not self.levels or "bf16" not in self.peak_flops:
            raise ConfigError(f"cluster {self.name} needs peak_flops.bf16 and at least one level.")
        sizes = [one.devices or 0 for one in self.levels[:-1]]
        if 0 in sizes or sorted(set(sizes)) != sizes:
            raise ConfigError(f"cluster {self.name}: each level has to join more devices than the one before: {sizes}")

    @property
    def devices_per_node(self) -> int:
        """Devices that the innermost level joins."""
        return self.levels[0].devices or 1

    @property
    def devices(self) -> int:
        """Devices in all."""
        return self.nodes * self.devices_per_node

    def flops(self, computed: float) -> float:
        """Returns the peak of matrix products.

        Args:
            computed: Bytes of an element.
        """
        dtype = "bf16" if computed <= 2 else "fp32" if computed <= 4 else "fp64"
        return self.peak_flops.get(dtype, self.peak_flops["bf16"])

    def with_nodes(self, nodes: int) -> Cluster:
        """Returns the same cluster with another number of nodes."""
        return replace(self, nodes=nodes)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Cluster:
        """Returns the cluster that a file of conf/cluster describes.

        Args:
            values: Its keys; ``levels`` is a mapping from a level's name to its attributes.

        Raises:
            ConfigError: A key is unknown or missing, or a figure is impossible.
        """
        _check_keys(values, fields(cls), f"cluster {values.get('name', '?')}")
        levels = {name: one for name, one in values["levels"].items() if one is not None}
        for name, one in levels.items():
            # Its name is the key.
            _check_keys(one, fields(Level)[1:], f"cluster {values['name']}, levels.{name}")
        given = dict(values)
        given["levels"] = tuple(Level(name=name, **one) for name, one in levels.items())
        given["peak_flops"] = MappingProxyType({dtype: float(peak) for dtype, peak in values["peak_flops"].items()})
        return cls(**given)


def _check_keys(values: Mapping[str, Any], attributes: Sequence[Field[Any]], what: str) -> None:
    """Refuses keys that do not exist, and tells those that are missing."""
    known = [one.name for one in attributes]
    needed = [one.name for one in attributes if one.default is MISSING]
    problems = [f"{key} does not exist{did_you_mean(key, known)}" for key in values if key not in known]
    problems += [f"{key} is missing" for key in needed if key not in values]
    if problems:
        raise ConfigError(f"{what}: {', '.join(problems)}.", valid=known)


@lru_cache(maxsize=32)
def load_cluster(name: str) -> Cluster:
    """Returns a packaged cluster.

    Args:
        name: Of a file in conf/cluster, without its ending.

    Raises:
        ConfigError: There is no such file.
    """
    files = {path.stem: path for path in sorted((conf_dir() / "cluster").glob("*.yaml"))}
    if name not in files:
        close = nearest(name, files)
        raise ConfigError(f"there is no cluster {name!r}.", valid=files, fix=f"cluster={close}" if close else None)
    values = OmegaConf.to_container(OmegaConf.load(files[name]), resolve=True)
    assert isinstance(values, dict)
    return Cluster.from_mapping({str(key): value for key, value in values.items()})


def measured_cluster(
    *,
    name: str,
    device: str,
    memory: float,
    memory_bandwidth: float,
    matmul_flops: Mapping[str, float],
    levels: Sequence[Level],
    nodes: int = 1,
    reserved: float | None = None,
    source: str = "measured",
) -> Cluster:
    """Returns the cluster whose predictions are what was measured of its parts.

    A cluster has the figures of data sheets, of which the time model reaches a share; measured figures are what is
    reached. So the products' efficiency is 1, and bandwidths are divided by the share that a collective gets of them.

    Args:
        name: How to call it.
        device: The device.
        memory: Bytes of a device's memory.
        memory_bandwidth: Bytes per second that a copy reads and writes.
        matmul_flops: Operations per second that a large product reaches, by dtype: "bf16", "fp32", "fp64". "bf16" is
            needed; where 16 bit is not what is computed in, the figure of "fp32" stands for it.
        levels: What joins the devices, the innermost first. Bandwidth: bytes per second that a rank sends in a ring,
            which is 2 (n - 1) / n of a large all-reduce's bytes over its seconds; of outer levels that of a group with
            one rank in each node. Latency: seconds of an all-gather of a few bytes, half of an all-reduce's.
            ``devices`` is None in the last one, if it joins all.
        nodes: Number of nodes.
        reserved: Bytes of a device that no tensor gets; None: as on GPUs.
        source: Where and when it was measured.

    Raises:
        ConfigError: A figure is missing or not positive, or the levels do not grow.
    """
    shares = (FITTED.inner_share, *(FITTED.outer_share,) * max(0, len(levels) - 1))
    return Cluster(
        name=name,
        device=device,
        nodes=nodes,
        memory=memory,
        reserved=reserved,
        memory_bandwidth=memory_bandwidth,
        peak_flops=MappingProxyType(dict(matmul_flops)),
        matmul_efficiency=1.0,
        levels=tuple(replace(one, bandwidth=one.bandwidth / share) for one, share in zip(levels, shares, strict=True)),
        source=source,
    )


def cluster_text(cluster: Cluster) -> str:
    """Returns a cluster as the text of a file of conf/cluster, which `load_cluster` and ``cluster=NAME`` read.

    Args:
        cluster: The cluster; its figures are written with four digits.
    """
    lines = [
        "# Bandwidths in bytes per second, of one device, in one direction.",
        "",
        f"name: {_quoted(cluster.name)}",
        f"device: {_quoted(cluster.device)}",
        f"nodes: {cluster.nodes}",
        f"memory: {_number(cluster.memory)}",
        *([f"reserved: {_number(cluster.reserved)}"] if cluster.reserved is not None else []),
        f"memory_bandwidth: {_number(cluster.memory_bandwidth)}",
        "peak_flops:",
        *(f"  {dtype}: {_number(peak)}" for dtype, peak in cluster.peak_flops.items()),
        f"matmul_efficiency: {cluster.matmul_efficiency:g}",
        "levels:",
    ]
    for one in cluster.levels:
        lines.append(f"  {_quoted(one.name)}:")
        lines += [f"    devices: {one.devices}"] if one.devices is not None else []
        lines += [f"    bandwidth: {_number(one.bandwidth)}", f"    latency: {_number(one.latency)}"]
    lines += [
        f"time_scale: {cluster.time_scale:.4g}",
        f"time_band: {cluster.time_band:g}",
        f"source: {_quoted(cluster.source)}",
    ]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """A float in powers of a thousand, with a point: without one YAML reads text."""
    power = 3 * math.floor(math.log10(value) / 3) if value > 0 else 0
    digits = f"{value / 10**power:.4g}"
    return f"{digits if '.' in digits else f'{digits}.0'}e{power}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
