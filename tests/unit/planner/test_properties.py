"""What must hold whatever the constants are."""

from dataclasses import replace

import pytest

from lightning_3d.errors import BatchError, ConfigError, MeshError
from lightning_3d.parallel.pipeline.balance import balanced
from lightning_3d.planner import BatchShape, Cluster, DecoderShape, MeshShape, load_cluster, predict
from lightning_3d.planner.case import Case
from lightning_3d.planner.constants import FITTED
from lightning_3d.planner.decoder import decoder_model
from lightning_3d.planner.layout import place_blocks
from lightning_3d.planner.prediction import ESTIMATE, Prediction
from lightning_3d.planner.shared import Shared
from lightning_3d.planner.software import THIS_LIBRARY
from lightning_3d.planner.traffic import step_traffic

LLAMA = DecoderShape(32, 4096, 32, 8, 14336, 128256, 4096)
A100 = load_cluster("a100_x8")


def priced(cluster: Cluster = A100, micro: int = 1, kind: str = "none", size: int = 256, **mesh: int) -> Prediction:
    shape = MeshShape(**{"data_parallel_size": 8, **mesh})  # type: ignore[arg-type]
    batch = BatchShape(global_size=size, micro_size=micro)
    return predict(LLAMA, shape, batch, cluster, activation_checkpointing=kind)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("pipeline", [1, 4])
def test_more_data_ranks_never_need_more_memory(stage: int, pipeline: int) -> None:
    sizes = [
        priced(data_parallel_size=data, zero_stage=stage, pipeline_parallel_size=pipeline, size=1024).allocated_bytes
        for data in (2, 4, 8, 16, 64)
    ]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("mesh", [{"zero_stage": 3}, {"tensor_parallel_size": 8}, {"pipeline_parallel_size": 8}])
@pytest.mark.parametrize("level", [0, 1])
def test_faster_links_never_take_longer(mesh: dict[str, int], level: int) -> None:
    seconds = []
    for factor in (0.25, 1.0, 4.0):
        levels = list(A100.levels)
        levels[level] = replace(levels[level], bandwidth=levels[level].bandwidth * factor)
        cluster = replace(A100, levels=tuple(levels))
        seconds.append(priced(cluster, data_parallel_size=16, **mesh).step_seconds)
    assert seconds == sorted(seconds, reverse=True)


def test_faster_devices_and_more_memory_bandwidth_never_take_longer() -> None:
    slow = priced().step_seconds
    assert priced(replace(A100, peak_flops={"bf16": 624e12})).step_seconds < slow
    assert priced(replace(A100, memory_bandwidth=4e12)).step_seconds < slow


@pytest.mark.parametrize("tensor", [1, 4])
def test_higher_stages_never_send_less(tensor: int) -> None:
    shared = Shared(decoder_model(LLAMA), A100, "bf16_master", THIS_LIBRARY, FITTED)
    sent = []
    for stage in (1, 2, 3):
        mesh = MeshShape(data_parallel_size=8, tensor_parallel_size=tensor, zero_stage=stage)
        case = Case.checked(mesh, BatchShape(global_size=64, micro_size=1), "1f1b", "none")
        sent.append(step_traffic(shared, case).wire)
    assert sent == sorted(sent)


def test_recomputing_trades_time_for_memory() -> None:
    found = [priced(kind=kind, micro=4) for kind in ("none", "selective", "full")]
    assert [one.allocated_bytes for one in found] == sorted((one.allocated_bytes for one in found), reverse=True)
    assert [one.step_seconds for one in found] == sorted(one.step_seconds for one in found)
    assert found[0].tflops_per_device == found[0].hardware_tflops_per_device < 312


def test_the_parts_add_up() -> None:
    found = priced(pipeline_parallel_size=4, tensor_parallel_size=2, stages_per_rank=2)
    assert found.step_seconds == pytest.approx(sum(found.time.by_name().values()))
    assert found.allocated_bytes == pytest.approx(sum(found.memory.by_name().values()))
    assert found.mfu == pytest.approx(found.tflops_per_device / 312)
    assert found.needed_bytes > found.allocated_bytes
    assert ESTIMATE in str(found)
    assert "± 10%" in str(found)
    assert "± 20%" in str(found)
    assert found.as_dict()["step_seconds"] == found.step_seconds


def test_the_order_of_ranks_does_not_matter_where_all_links_are_equal() -> None:
    flat = replace(A100, levels=(replace(A100.levels[0], devices=None),))
    mesh = MeshShape(data_parallel_size=4, pipeline_parallel_size=4, tensor_parallel_size=2)
    batch = BatchShape(global_size=64, micro_size=1)
    orders = ("data,pipeline,tensor", "pipeline,data,tensor", "tensor,pipeline,data")
    times = {predict(LLAMA, replace(mesh, rank_order=order), batch, flat).step_seconds for order in orders}
    assert len(times) == 1


def test_a_higher_degree_of_replicas_is_hybrid_sharding() -> None:
    whole = priced(data_parallel_size=64, zero_stage=3)
    hybrid = priced(data_parallel_size=64, data_replicate_size=8, zero_stage=3)
    assert hybrid.memory.optimizer == pytest.approx(8 * whole.memory.optimizer)


@pytest.mark.parametrize("layers", [7, 24, 33])
@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("last", [0.0, 0.4, 1.0, 2.7])
def test_equal_blocks_are_cut_as_the_pipeline_cuts_them(layers: int, stages: int, last: float) -> None:
    layout = place_blocks([2.0] * layers, schedule="1f1b", ranks=stages, stages_per_rank=1, last_cost=2 * last)
    found = tuple(end - begin for kind in layout.kinds for begin, end in kind.spans)
    assert found == balanced([2.0] * (layers - 1) + [2 + 2 * last], stages)


def test_padding_is_counted() -> None:
    """FSDP2 pads dim 0 of a parameter to a multiple of its shards: a dry run of 1024 x 8 ranks gathers 22 % more."""
    block = decoder_model(DecoderShape(80, 8192, 64, 8, 28672, 128256, 8192)).blocks[0]
    assert block.padding(8, 1024) / block.parameters_on_rank(8) == pytest.approx(4.844 / 3.985 - 1, abs=0.002)
    assert block.padding(8, 128) == 0


def test_errors_name_the_fix() -> None:
    batch = BatchShape(global_size=12, micro_size=1)
    with pytest.raises(BatchError, match="does not divide into 8 data ranks"):
        predict(LLAMA, MeshShape(data_parallel_size=8), batch, "a100_x8")
    with pytest.raises(BatchError, match="more than the 3"):
        predict(LLAMA, MeshShape(data_parallel_size=4), BatchShape(global_size=12, micro_size=4), "a100_x8")
    with pytest.raises(ConfigError, match="no cluster 'a100_x9'"):
        predict(LLAMA, MeshShape(data_parallel_size=4), batch, "a100_x9")
    with pytest.raises(ConfigError, match="no recipe of bytes 'bf16'"):
        predict(LLAMA, MeshShape(data_parallel_size=4), batch, "a100_x8", bytes_recipe="bf16")
    with pytest.raises(ConfigError, match="activation_checkpointing='all'"):
        predict(LLAMA, MeshShape(data_parallel_size=4), batch, "a100_x8", activation_checkpointing="all")
    mesh = MeshShape(data_parallel_size=1, pipeline_parallel_size=64)
    with pytest.raises(MeshError, match="32 blocks cannot fill 64 stages"):
        predict(LLAMA, mesh, BatchShape(global_size=64, micro_size=1), "a100_x8")
    with pytest.raises(MeshError, match="tensor_parallel_size=16 does not divide 8 heads") as undivided:
        predict(LLAMA, MeshShape(data_parallel_size=1, tensor_parallel_size=16), batch, "a100_x8")
    assert str(undivided.value).endswith("valid: 1, 2, 4, 8\n  fix: tensor_parallel_size=8")
    narrow = DecoderShape(4, 512, 8, 8, 4098, 512, 64)
    with pytest.raises(MeshError, match="tensor_parallel_size=4 does not divide 4098 features"):
        predict(narrow, MeshShape(data_parallel_size=1, tensor_parallel_size=4), batch, "a100_x8")
    with pytest.raises(BatchError, match="micro_size=4 does not divide the 6 samples") as uneven:
        predict(LLAMA, MeshShape(data_parallel_size=2), BatchShape(global_size=12, micro_size=4), "a100_x8")
    assert str(uneven.value).endswith("valid: 1, 2, 3, 6\n  fix: batch.micro_size=3")
    with pytest.raises(MeshError, match="zero_stage=4"):
        MeshShape(data_parallel_size=4, zero_stage=4)
    with pytest.raises(MeshError, match="data_replicate_size=3 does not divide"):
        MeshShape(data_parallel_size=4, data_replicate_size=3)
