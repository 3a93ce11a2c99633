"""What of a module's structure is seen when its weights are loaded: classes, settings, and who has changed places."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor, nn

from lightning_3d.checkpoint.structure import Structure, compared
from lightning_3d.errors import CheckpointError


class Plain(nn.Module):
    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


class Gated(Plain):
    """Has the same names and shapes."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.norm(self.layer(x)).sigmoid()


class Wrapped(nn.Module):
    """Has its module where torch.compile has it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def stack(*blocks: nn.Module, activation: nn.Module | None = None) -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList(blocks), "act": activation or nn.ReLU()})


def against(saved: nn.Module, now: nn.Module, *, strict: bool = True) -> tuple[str, ...]:
    """What is found when a module loads the weights of another one, whose structure went through a checkpoint."""
    saved.load_state_dict(now.state_dict())
    return compared("a.ckpt", Structure.of(saved).plain(), Structure.of(now), strict=strict).converted


def test_the_same_structure_has_the_same_hash() -> None:
    one, other = Structure.of(stack(Plain(), Gated())), Structure.of(stack(Plain(), Gated()))
    assert one.digest == other.digest == Structure.from_plain(one.plain()).digest
    assert against(stack(Plain(), Gated()), stack(Plain(), Gated())) == ()
    assert one.digest != Structure.of(stack(Gated(), Plain())).digest


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        (lambda: stack(Plain(), Gated(), Plain()), lambda: stack(Gated(), Plain(), Plain())),
        (lambda: stack(Plain(eps=1e-6), Plain()), lambda: stack(Plain(), Plain(eps=1e-6))),
    ],
    ids=["classes", "settings"],
)
def test_layers_that_changed_places_are_an_error(saved: Callable[[], nn.Module], now: Callable[[], nn.Module]) -> None:
    with pytest.raises(CheckpointError, match=r"blocks\.0 is the \w+ that was saved as blocks\.1") as caught:
        against(saved(), now())
    assert "strict_loading = False" in str(caught.value)
    assert "blocks.0 is the" in against(saved(), now(), strict=False)[0]


@pytest.mark.parametrize(
    ("saved", "now", "text"),
    [
        (stack(Plain(), Gated()), stack(Plain(), Plain()), "blocks.1 is a Plain, saved as a Gated"),
        (stack(Plain()), stack(Plain(), activation=nn.GELU()), "act is a GELU, saved as a ReLU"),
        (
            stack(Plain()),
            stack(Plain(eps=1e-6)),
            "blocks.0.norm is LayerNorm((4,), eps=1e-06, ",
        ),
    ],
    ids=["another class", "another activation", "another epsilon"],
)
def test_other_layers_are_told(saved: nn.Module, now: nn.Module, text: str) -> None:
    assert against(saved, now)[0].startswith(text)


def test_what_has_no_tensors_may_change_places() -> None:
    one, other = nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.ReLU())
    assert against(one, other) == ("0 is a Tanh, saved as a ReLU", "1 is a ReLU, saved as a Tanh")


def test_what_only_one_of_them_has_is_left_to_the_names_of_tensors() -> None:
    assert against(stack(Plain()), nn.ModuleDict({**dict(stack(Plain()).named_children()), "loss": nn.L1Loss()})) == ()


def test_wrappers_and_addresses_do_not_count() -> None:
    class Shows(nn.Module):
        def extra_repr(self) -> str:
            return f"hook={object()}"

    class Breaks(nn.Module):
        def extra_repr(self) -> str:
            raise RuntimeError

    assert against(nn.Sequential(Shows(), Breaks()), nn.Sequential(Shows(), Breaks())) == ()
    wrapped = nn.ModuleDict({"a": Wrapped(nn.Sequential(Plain()))})
    assert Structure.of(wrapped).digest == Structure.of(nn.ModuleDict({"a": nn.Sequential(Plain())})).digest


def test_a_checkpoint_without_a_structure_loads() -> None:
    assert compared("a.ckpt", None, Structure.of(stack(Plain())), strict=True).converted == ()
