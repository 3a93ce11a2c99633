"""Published tables as questions to the planner with their measured answers; each file names its source."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_3d.planner import MEGATRON, BatchShape, Cluster, DecoderShape, MeshShape, Software
from lightning_3d.planner.case import Case
from lightning_3d.planner.cluster import load_cluster
from lightning_3d.planner.constants import FITTED, Constants
from lightning_3d.planner.decoder import decoder_model
from lightning_3d.planner.prediction import Prediction
from lightning_3d.planner.pricing import Pricer
from lightning_3d.planner.recipes import byte_recipe
from lightning_3d.planner.speed import Group, Speed

PUBLISHED = Path(__file__).parent / "published"
# Data ranks inside a node, stages across: the order of Megatron-LM and Megatron-DeepSpeed.
MEGATRON_ORDER = "pipeline,data,tensor"

A100 = load_cluster("a100_x8")
A100_40GB = replace(A100, name="a100_40gb_x8", memory=40e9, memory_bandwidth=1.555e12)
# Nodes of 8 with four ports of 100 Gb/s: Jean Zay, in bigscience's chronicles. The bandwidth is fitted: a
# fifth of what the ports have.
JEAN_ZAY = replace(A100, name="jean_zay", levels=(A100.levels[0], replace(A100.levels[1], bandwidth=1.33e9)))
H100 = load_cluster("h100_x8")
# The H100 with HBM2e of torchtitan's report.
H100_94GB = replace(H100, name="h100_94gb_x8", memory=94e9, memory_bandwidth=2.4e12)

# This library's habits, on blocks as papers count them.
FSDP = Software(reference_blocks=False)
FSDP_16BIT = replace(FSDP, reduced=2.0)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published configuration.

    Attributes:
        table: Name of its table.
        label: What tells it apart.
        shape: The model.
        mesh: The mesh.
        batch: The batch.
        cluster: The cluster.
        recipe: Bytes per parameter.
        kind: Of activation checkpointing.
        software: What ran.
        seconds: Measured time of a step, if published.
        memory: Measured memory in bytes, if published; infinite where it did not fit.
        group: Rows whose measurements may be compared.
    """

    table: str
    label: str
    shape: DecoderShape
    mesh: MeshShape
    batch: BatchShape
    cluster: Cluster = A100
    recipe: str = "megatron"
    kind: str = "full"
    software: Software = MEGATRON
    seconds: float | None = None
    memory: float | None = None
    group: str = ""

    def predict(self, constants: Constants = FITTED, efficiency: float | None = None) -> Prediction:
        """Returns the prediction; ``efficiency`` takes the place of the cluster's."""
        cluster = self.cluster if efficiency is None else replace(self.cluster, matmul_efficiency=efficiency)
        pricer = Pricer(
            decoder_model(self.shape, self.software), cluster, self.recipe, software=self.software, constants=constants
        )
        return pricer.predict(Case.checked(self.mesh, self.batch, "1f1b", self.kind))

    def predict_seconds(self, constants: Constants = FITTED, efficiency: float | None = None) -> float:
        """Returns the predicted time of a step."""
        return self.predict(constants, efficiency).step_seconds


def lines(name: str) -> list[dict[str, str]]:
    """Returns the lines of a file by column."""
    with open(PUBLISHED / f"{name}.csv", newline="") as file:
        return list(csv.DictReader(file))


def gpt(layers: int, hidden: int, heads: int, *, vocab: int = 51200, sequence: int = 2048) -> DecoderShape:
    """Returns a decoder of GPT's form."""
    return DecoderShape(layers, hidden, heads, heads, 4 * hidden, vocab, sequence)


def sc21() -> Iterator[Row]:
    """Narayanan et al. 2021, table 1; times from the operations that it counts, equation 3."""
    for line in lines("megatron_sc21_table1"):
        layers, hidden, batch = int(line["layers"]), int(line["hidden"]), int(line["global_batch"])
        sequence, vocab = int(line["seq"]), int(line["vocab"])
        operations = 96 * batch * sequence * layers * hidden**2
        operations *= 1 + sequence / (6 * hidden) + vocab / (16 * layers * hidden)
        yield Row(
            table="SC21 table 1",
            label=f"{line['params_B']}B",
            shape=gpt(layers, hidden, int(line["heads"]), vocab=vocab, sequence=sequence),
            mesh=MeshShape(
                data_parallel_size=int(line["dp"]),
                pipeline_parallel_size=int(line["pp"]),
                tensor_parallel_size=int(line["tp"]),
                zero_stage=0,
                stages_per_rank=int(line["virtual_stages_v"]),
                rank_order=MEGATRON_ORDER,
            ),
            batch=BatchShape(global_size=batch, micro_size=int(line["micro_batch"])),
            seconds=operations / (float(line["tflops_per_gpu_hw"]) * 1e12) / int(line["gpus"]),
        )


def korthikanti() -> Iterator[Row]:
    """Korthikanti et al. 2022, table 5: full recomputation, then sequence parallelism with selective."""
    for line in lines("activation_recompute_table3_5"):
        for kind, column in (("full", "iter_s_full_recompute"), ("selective", "iter_s_sp_plus_selective")):
            yield Row(
                table="Korthikanti table 5",
                label=f"{line['model']} {kind}",
                shape=gpt(int(line["layers"]), int(line["hidden"]), int(line["heads"])),
                mesh=MeshShape(
                    data_parallel_size=int(line["dp"]),
                    pipeline_parallel_size=int(line["pp"]),
                    tensor_parallel_size=int(line["tp"]),
                    zero_stage=0,
                    stages_per_rank=int(line["interleave_v"]),
                    sequence_parallel=kind == "selective",
                    rank_order=MEGATRON_ORDER,
                ),
                batch=BatchShape(global_size=int(line["global_batch"]), micro_size=int(line["micro_batch"])),
                kind=kind,
                seconds=float(line[column]),
            )


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One published time of a single block, forward and backward.

    Attributes:
        table: Name of its table.
        label: What tells it apart.
        shape: The model.
        samples: Of a micro-batch.
        tensor: Tensor degree.
        sequence_parallel: The sequence is cut.
        kind: Of activation checkpointing.
        seconds: Measured.
    """

    table: str
    label: str
    shape: DecoderShape
    samples: int
    tensor: int
    sequence_parallel: bool
    kind: str
    seconds: float
    cluster: Cluster = A100
    software: Software = MEGATRON

    def predict_seconds(self, constants: Constants = FITTED, efficiency: float | None = None) -> float:
        """Returns the prediction; ``efficiency`` takes the place of the cluster's."""
        cluster = self.cluster if efficiency is None else replace(self.cluster, matmul_efficiency=efficiency)
        recipe = byte_recipe("megatron")
        times = Speed(cluster=cluster, recipe=recipe, software=self.software, constants=constants).part(
            decoder_model(self.shape, self.software).blocks[0],
            samples=self.samples,
            tensor=Group(size=self.tensor, stride=1),
            sequence_parallel=self.sequence_parallel,
            kind=self.kind,
        )
        return times.forward + times.backward


def korthikanti_layers() -> Iterator[Layer]:
    """Korthikanti et al. 2022, table 4: a block of the 22B model on 8 tensor ranks, 4 samples."""
    for line in lines("activation_recompute_table4_layer_ms"):
        name = line["experiment"]
        yield Layer(
            table="Korthikanti table 4",
            label=name,
            shape=gpt(48, 6144, 64),
            samples=4,
            tensor=8,
            sequence_parallel="sequence" in name,
            kind="full" if name.startswith("full") else "selective" if name.startswith("selective") else "none",
            seconds=float(line["total_ms"]) / 1e3,
        )


_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
_MPT_VOCABULARY = 50368


def mpt() -> Iterator[Row]:
    """llm-foundry's throughputs of MPT models under FSDP's full sharding."""
    for line in lines("llm_foundry_mpt"):
        sequence, is_small = int(line["seq"]), line["gpu"] == "a100_40gb"
        layers, hidden, heads = _MPT[line["model"]]
        yield Row(
            table=f"MPT A100 {'40' if is_small else '80'} GB",
            label=f"{line['model']} {sequence} x{line['gpus']}",
            shape=gpt(layers, hidden, heads, vocab=_MPT_VOCABULARY, sequence=sequence),
            mesh=MeshShape(data_parallel_size=int(line["gpus"]), zero_stage=3),
            batch=BatchShape(global_size=int(line["global_batch"]), micro_size=int(line["micro_batch"])),
            cluster=A100_40GB if is_small else A100,
            recipe="bf16_master",
            kind="full" if line["act_ckpt"] == "True" else "none",
            software=FSDP_16BIT if line["mp_mode"] == "PURE" else FSDP,
            seconds=float(line["global_batch_tokens"]) / float(line["tokens_s"]),
        )


_LLAMA3 = {
    "8B": DecoderShape(32, 4096, 32, 8, 14336, 128256, 8192),
    "70B": DecoderShape(80, 8192, 64, 8, 28672, 128256, 8192),
    "405B": DecoderShape(126, 16384, 128, 8, 53248, 128256, 8192),
}


def torchtitan() -> Iterator[Row]:
    """torchtitan's report of 2024; "selective layer" has no counterpart here."""
    for line in lines("torchtitan_2024h1_a100_h100"):
        if line["ac"] == "selective layer":
            continue
        data, tensor, local = int(line["fsdp"]), int(line["tp"]), int(line["local_batch"])
        shape = _LLAMA3[line["model"].partition("-")[2]]
        float8, is_h100 = "float8" in line["optim"], line["gpu"].startswith("H100")
        yield Row(
            table=f"torchtitan {'H100' if is_h100 else 'A100'}",
            label=f"{line['model']} {line['ac']} {line['optim']}",
            shape=shape,
            mesh=MeshShape(
                data_parallel_size=data, tensor_parallel_size=tensor, zero_stage=3, sequence_parallel=tensor > 1
            ),
            batch=BatchShape(global_size=data * local, micro_size=local),
            cluster=H100_94GB if is_h100 else A100,
            recipe="bf16_master",
            kind="selective" if line["ac"].startswith("selective") else "full",
            # Gathers weights in 8 bit too.
            software=replace(
                FSDP,
                float8=float8,
                gathered=1.0 if float8 else None,
                overlaps_tensor="asyncTP" in line["optim"],
            ),
            seconds=data * local * shape.sequence / (float(line["wps_per_gpu"]) * int(line["gpus"])),
        )


def llama3() -> Iterator[Row]:
    """Dubey et al. 2024, table 4: one layer less on the first and last of 16 x 8 stages (section 3.3.2)."""
    for line in lines("llama3_405b_table4"):
        if line["cp"] != "1":
            continue
        shape, data, batch = _LLAMA3["405B"], int(line["dp"]), int(line["batch_per_dp"])
        operations = 72 * batch * data * shape.sequence * shape.layers * shape.hidden**2
        operations = 3 * 2 * batch * data * shape.sequence * 405.85e9
        operations += 12 * batch * data * shape.layers * shape.hidden * shape.sequence**2
        yield Row(
            table="Llama 3 405B",
            label=f"{line['gpus']} GPUs",
            shape=shape,
            mesh=MeshShape(
                data_parallel_size=data,
                pipeline_parallel_size=int(line["pp"]),
                tensor_parallel_size=int(line["tp"]),
                zero_stage=1,
                stages_per_rank=8,
                sequence_parallel=True,
                layers_per_stage=(0, *(1,) * 126, 0),
                rank_order="data,pipeline,tensor",
            ),
            batch=BatchShape(global_size=batch * data, micro_size=1),
            cluster=H100,
            recipe="megatron",
            kind="none",
            software=FSDP,
            seconds=operations / (float(line["tflops_per_gpu"]) * 1e12) / int(line["gpus"]),
        )


# Rows that cannot be what they say; numbers are lines of the source.
_WRONG = {"775": "1568 and 2016 samples at the same time", "802": "the stage of ZeRO is missing"}
_BLOOM_VOCABULARY = 250_880


def bloom() -> Iterator[Row]:
    """bigscience's search for the mesh of BLOOM-176B: times and memory of many meshes."""
    seen = set()
    for line in lines("bloom_176b_topology_sweep"):
        if line["size"] == "20B" or line["line"] in _WRONG:
            continue
        # The same measurement stands in several lists.
        key = tuple(line[name] for name in ("date", "dp", "tp", "pp", "mbs", "gbs", "layers", "heads", "sec_per_it"))
        if key in seen or not line["gbs"]:
            continue
        seen.add(key)
        row = _bloom_row(line)
        if row is not None:
            yield row


def _bloom_row(line: dict[str, str]) -> Row | None:
    data, tensor, pipeline = int(line["dp"]), int(line["tp"]), int(line["pp"])
    batch, micro = int(line["gbs"]), int(line["mbs"])
    if data * tensor * pipeline != int(line["gpus"]) or batch // data % micro:
        return None
    hidden = int(line["hidden"])
    late = line["section"] == "Rebalancing layers"
    layers = int(line["layers"] or 0) or _layers_by_time(line)
    split = None
    if late:
        # Embedding and head count as a layer each.
        slots = (layers + 2) // pipeline
        split = (slots - 1, *(slots,) * (pipeline - 2), slots - 1)
    fits = "OOM" not in line["mem_GB"]
    memory = float(line["mem_GB"]) * 1e9 if fits and line["mem_GB"] else None
    return Row(
        table="BLOOM late" if late else "BLOOM",
        label=f"line {line['line']}: dp {data} tp {tensor} pp {pipeline} mbs {micro} gbs {batch}",
        shape=gpt(layers, hidden, int(line["heads"] or 96), vocab=_BLOOM_VOCABULARY),
        mesh=MeshShape(
            data_parallel_size=data,
            tensor_parallel_size=tensor,
            pipeline_parallel_size=pipeline,
            zero_stage=int(line["zero(blank=1)"].strip("ZS") or 1),
            layers_per_stage=split,
            rank_order=MEGATRON_ORDER,
        ),
        batch=BatchShape(global_size=batch, micro_size=micro),
        cluster=JEAN_ZAY,
        recipe="bf16_optimizer" if late else "deepspeed",
        kind="full",
        seconds=float(line["sec_per_it"]) if fits and line["sec_per_it"] else None,
        memory=memory if fits else float("inf"),
        group=f"{line['date'][:5]} {layers}x{hidden} heads {line['heads']} gpus {line['gpus']} gbs {batch // 100}",
    )


def _layers_by_time(line: dict[str, str]) -> int:
    """The number of layers that the source counted operations for, where it gives only their speed."""
    operations = float(line["tflops_gpu"]) * 1e12 * int(line["gpus"]) * float(line["sec_per_it"])
    return round(operations / (96 * int(line["gbs"]) * 2048 * int(line["hidden"]) ** 2))


def timed() -> list[Row | Layer]:
    """Returns every row with a time."""
    every = (*sc21(), *korthikanti(), *korthikanti_layers(), *mpt(), *torchtitan(), *llama3(), *bloom())
    return [row for row in every if row.seconds is not None]
