"""Features of checkpoints: saving, resuming, and one run after another."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial

from tests.features import reruns, resuming, saving
from tests.features.here import Here
from tests.features.table import Feature, Program, Seen

# Lightning's advice, which these programs do not follow on purpose, and what torch.compile says of gradients.
_ADVICE = (
    "Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need to be provided",
    r"`.fit\(ckpt_path=None\)` was called without a model",
    r'.fit\(ckpt_path="last"\) is set, but there is no last checkpoint available',
    "The dirpath has changed from",
    "You're resuming from a checkpoint that ended before the epoch ended",
    "The .grad attribute of a Tensor that is not a leaf Tensor is being accessed",
)


def _unadvised(here: Here, program: Program) -> Seen:
    with warnings.catch_warnings():
        for text in _ADVICE:
            warnings.filterwarnings("ignore", message=text)
        return program(here)


FEATURES: tuple[Feature, ...] = tuple(
    replace(feature, program=partial(_unadvised, program=feature.program))
    for feature in (*saving.FEATURES, *resuming.FEATURES, *reruns.FEATURES)
)
