from __future__ import annotations

import subprocess
import sys

from lightning_3d.random.seeds import derive_seed


def test_seed_is_stable_between_processes_and_versions() -> None:
    # A written number: if the derivation ever changes, every model's initial weights and dropout change with it.
    assert derive_seed(1234, "initial", "model.layers.3.weight") == 12038323102098272011
    code = "from lightning_3d.random.seeds import derive_seed; print(derive_seed(7, 'a', 3))"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(fresh.stdout) == derive_seed(7, "a", 3)


def test_parts_cannot_run_into_each_other() -> None:
    seeds = [
        derive_seed(1, "a", 12),
        derive_seed(1, "a1", 2),
        derive_seed(1, "a", "12"),
        derive_seed(1, "a, 12"),
        derive_seed(1, "a", 1, 2),
        derive_seed(11, "a", 2),
        derive_seed(1),
        derive_seed(-1),
        derive_seed(1, "'"),
        derive_seed(1, '"'),
        derive_seed(1, "ä"),
        derive_seed(1, "\\xe4"),
    ]
    assert len(set(seeds)) == len(seeds)


def test_seeds_fill_64_bits_and_differ_in_the_low_32() -> None:
    seeds = [derive_seed(0, step, name) for step in range(100) for name in ("a", "b", "c")]
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert max(seeds) > 2**63
    assert len({seed % 2**32 for seed in seeds}) == len(seeds)
