"""Published bubbles as questions to the planner, with the share of a step in which ranks wait."""

from collections.abc import Iterator
from dataclasses import replace

from lightning_3d.planner import MEGATRON, BatchShape, MeshShape
from lightning_3d.planner.prediction import Prediction
from tests.unit.planner.tables import MEGATRON_ORDER, Row, gpt, lines

# Zero Bubble, table 4: layers, heads, hidden size; tables 5 and 8: samples of a micro-batch.
_ZERO_BUBBLE = {"1.5B": (24, 24, 2304, 6), "6.2B": (32, 32, 4096, 3)}


def bubbles() -> Iterator[tuple[Row, float]]:
    """Qi et al. 2023, tables 5 and 8: 1F1B and interleaved 1F1B, and the share of a step in which ranks wait.

    The authors computed it from measured times of stages and sends; a rank computes on while a send is on its way.
    """
    for line in lines("zero_bubble_bubble_rates"):
        if line["schedule"] not in ("1F1B", "1F1B-I"):
            continue
        ranks, count = int(line["pp"]), int(line["microbatches"])
        layers, heads, hidden, micro = _ZERO_BUBBLE[line["model"]]
        stages = layers // ranks if line["schedule"] == "1F1B-I" else 1
        mesh = MeshShape(
            data_parallel_size=1,
            pipeline_parallel_size=ranks,
            stages_per_rank=stages,
            rank_order=MEGATRON_ORDER,
            layers_per_stage=(layers // ranks // stages,) * (ranks * stages),
        )
        row = Row(
            table="Zero Bubble",
            label=f"{line['model']} {ranks} x {count} {line['schedule']}",
            # No head on the last rank: theirs has as many layers less as it weighs.
            shape=gpt(layers, hidden, heads, vocab=512, sequence=1024),
            mesh=mesh,
            batch=BatchShape(global_size=count * micro, micro_size=micro),
            kind="none",
            software=replace(MEGATRON, overlaps_sends=True),
        )
        yield row, float(line["bubble_rate"])


def waiting(found: Prediction) -> float:
    """Returns the bubble as Qi et al. count it: all but computation, sends included."""
    busy = found.time.compute
    return 1 - busy / (busy + found.time.bubble + found.time.pipeline)
