from __future__ import annotations

import copy
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, skip_init

from lightning_3d.errors import ModuleError
from lightning_3d.initial.materialise import materialise
from lightning_3d.initial.record import InitRecorder
from lightning_3d.initial.replay import InitTape
from lightning_3d.random.seeds import derive_seed


class Custom(nn.Module):
    """A module whose tensors are made by a function of the test's, in the ways people do it."""

    def __init__(self, make: Callable[[nn.Module], object]) -> None:
        super().__init__()
        make(self)


def record(build: Callable[[], nn.Module], seed: int = 1) -> tuple[nn.Module, InitTape]:
    recorder = InitRecorder(seed)
    with recorder:
        module = build()
    return module, recorder.tape(module)


def values(build: Callable[[], nn.Module], seed: int = 1) -> dict[str, Tensor]:
    module, tape = record(build, seed)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    assert all(tensor.is_meta for tensor in tensors.values())
    return {name: tape.value(name) for name in tensors}


def test_values_depend_on_seed_and_name_only() -> None:
    def build() -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})

    def build_otherwise() -> nn.Module:
        nn.Linear(3, 3)
        b = nn.Linear(8, 8)
        torch.rand(5)
        return nn.ModuleDict({"c": nn.LSTM(3, 3), "b": b, "a": nn.Linear(8, 8)})

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first = values(build)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    second = values(build_otherwise)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["a.weight"], first["b.weight"])
    assert not torch.equal(first["a.weight"], values(build, seed=2)["a.weight"])


def test_a_value_is_the_eager_draw_from_its_own_seed() -> None:
    drawn = values(lambda: nn.Linear(8, 8))["weight"]
    torch.manual_seed(derive_seed(1, "initial", "weight", 0))
    assert torch.equal(drawn, nn.Linear(8, 8).weight)


def test_each_value_is_a_tensor_of_its_own() -> None:
    _, tape = record(lambda: nn.Linear(2, 2))
    tape.value("weight").zero_()
    assert tape.value("weight").abs().sum() > 0


def in_place_through_data(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.Tensor(6, 4))
    module.weight.data.fill_(2.0)
    module.weight.data[1:3] *= 3
    with torch.no_grad():
        module.weight[:, 0].zero_()
        module.weight[torch.arange(6) == 5] = 7
        module.weight.masked_fill_(module.weight > 6.5, -1)
    module.weight.data.copy_(module.weight.data)
    module.weight.data = module.weight.data.t()


def constants(module: nn.Module) -> None:
    module.register_buffer("scale", torch.tensor([1.0, 2.0]))
    module.register_buffer("twice", torch.tensor([1, 2]) * 2, persistent=False)
    module.register_buffer("array", torch.as_tensor(numpy.arange(3.0)))
    real = torch.zeros(2, device="cpu")
    copied = torch.empty(2)
    copied.copy_(real)
    real.fill_(9)
    module.register_buffer("copied", copied)
    module.register_buffer("mixed", torch.ones(2) + real)
    module.register_buffer("new", torch.ones(1, dtype=torch.int32).new_tensor([3, 4]))
    module.weight = nn.Parameter(torch.full((3,), 0.5))


def position_tables(module: nn.Module) -> None:
    inverse = 1.0 / (10000 ** (torch.arange(0, 8, 2, dtype=torch.int64).float() / 8))
    module.register_buffer("inverse", inverse, persistent=False)
    module.register_buffer("ids", torch.arange(5).expand((1, -1)))
    module.register_buffer("mask", torch.tril(torch.ones(4, 4, dtype=torch.bool)).view(1, 1, 4, 4))
    table = torch.zeros(5, 8)
    table[:, 0::2] = torch.sin(torch.arange(5).unsqueeze(1) * inverse)
    table[:, 1::2] = torch.cos(torch.arange(5).unsqueeze(1) * inverse)
    module.register_buffer("table", table)
    module.register_buffer("complex", torch.polar(torch.ones_like(inverse), inverse))
    module.register_buffer("scratch", torch.zeros(3).resize_(2))


def values_asked_for(module: nn.Module) -> None:
    rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
    module.register_buffer("rates", torch.tensor(rates))
    module.register_buffer("listed", torch.tensor(torch.linspace(0, 1, 3).tolist()))
    module.register_buffer("numpy", torch.tensor(torch.arange(3).numpy() * 2))
    module.register_buffer("where", torch.tensor([0, 3, 0, 4]).nonzero().squeeze(1))
    if torch.ones(1) > 0 and torch.equal(torch.ones(2), torch.ones(2)):
        module.register_buffer("branch", torch.full((1,), float(torch.ones(3).sum())))
    module.register_buffer("host", torch.tensor((torch.arange(3) + 1).cpu().sum().item()))


def conversions(module: nn.Module) -> None:
    module.linear = nn.Linear(2, 3).to(torch.bfloat16)
    nn.init.constant_(module.linear.weight, 1.7)
    nn.init.eye_(module.linear.weight)
    nn.init.ones_(module.linear.bias)
    module.double()
    module.conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    nn.init.dirac_(module.conv.weight)
    nn.init.constant_(module.conv.bias, 0.3)
    module.norm = nn.BatchNorm1d(3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "make", [in_place_through_data, constants, position_tables, values_asked_for, conversions], ids=lambda f: f.__name__
)
def test_values_without_chance_are_exactly_the_eager_ones(
    make: Callable[[nn.Module], None], dtype: torch.dtype
) -> None:
    torch.set_default_dtype(dtype)
    try:
        eager = Custom(make)
        recorded = values(lambda: Custom(make))
    finally:
        torch.set_default_dtype(torch.float32)
    expected = {**dict(eager.named_parameters()), **dict(eager.named_buffers())}
    assert recorded.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(recorded[name], tensor.detach(), rtol=0, atol=0)
        assert recorded[name].stride() == tensor.stride()


def test_tied_names_cloned_and_deep_copied_tensors_share_their_draw() -> None:
    def make(module: nn.Module) -> None:
        module.head = nn.Linear(4, 6, bias=False)
        module.embedding = nn.Embedding(6, 4)
        module.head.weight = module.embedding.weight
        module.target = copy.deepcopy(module.embedding)
        module.halved = nn.Parameter(module.embedding.weight.detach().clone() / 2)
        module.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)

    _, tape = record(lambda: Custom(make))
    weight = tape.value("head.weight")
    assert torch.equal(tape.value("embedding.weight"), weight)
    assert torch.equal(tape.value("target.weight"), weight)
    assert torch.equal(tape.value("halved"), weight / 2)
    first, second = (tape.value(f"layers.layers.{i}.linear1.weight") for i in range(2))
    assert torch.equal(first, second)


def test_orthogonal_sparse_and_truncated_initialisations() -> None:
    def make(module: nn.Module) -> None:
        for name in ("tall", "wide", "sparse", "narrow", "far"):
            setattr(module, name, nn.Parameter(torch.empty(40, 20) if name != "wide" else torch.empty(20, 40)))
        nn.init.orthogonal_(module.tall, gain=2)
        nn.init.orthogonal_(module.wide)
        nn.init.sparse_(module.sparse, 0.25)
        nn.init.trunc_normal_(module.narrow, std=0.5, a=-0.6, b=0.6)
        nn.init.trunc_normal_(module.far, std=1, a=2, b=3, generator=torch.Generator())

    drawn = values(lambda: Custom(make))
    torch.testing.assert_close(drawn["tall"].T @ drawn["tall"], 4 * torch.eye(20), rtol=0, atol=1e-5)
    torch.testing.assert_close(drawn["wide"] @ drawn["wide"].T, torch.eye(20), rtol=0, atol=1e-5)
    assert ((drawn["sparse"] == 0).sum(0) == 10).all()
    assert 0.55 < drawn["narrow"].abs().max() <= 0.6
    assert 2 <= drawn["far"].min() < drawn["far"].max() <= 3
    again = values(lambda: Custom(lambda m: (nn.Linear(9, 9), make(m))))
    assert all(torch.equal(drawn[name], again[name]) for name in drawn)


def test_scaling_after_initialisation_and_dead_operations() -> None:
    def make(module: nn.Module) -> None:
        module.linear = nn.Linear(64, 64)
        module.linear.weight.data.normal_(0, 0.02)
        module.linear.weight.data.div_(8)

    recorder = InitRecorder(1)
    with recorder:
        module = Custom(make)
    tape = recorder.tape(module)
    assert abs(tape.value("linear.weight").std().item() - 0.0025) < 2e-4
    # The default initialisation, the recorded allocation and everything else that normal_ buries are not replayed.
    weight = tape._windows["linear.weight"].storage
    assert len(tape._log.slice(weight)) == 2


@pytest.mark.parametrize(
    "wrap", [parametrizations.spectral_norm, parametrizations.weight_norm, parametrizations.orthogonal]
)
def test_parametrised_weights_are_consistent(wrap: Callable[[nn.Module], nn.Module]) -> None:
    module, tape = record(lambda: wrap(nn.Linear(12, 12)))
    materialise(module, tape, device=torch.device("cpu"))
    weight = module.eval().weight.detach()
    if wrap is parametrizations.weight_norm:
        parts = module.parametrizations.weight
        torch.testing.assert_close(parts.original0, parts.original1.norm(dim=1, keepdim=True))
    elif wrap is parametrizations.spectral_norm:
        assert 0.9 < torch.linalg.matrix_norm(weight, 2) < 1.2
    else:
        torch.testing.assert_close(weight @ weight.T, torch.eye(12), rtol=0, atol=1e-5)


def test_random_value_asked_for_while_recording_stays_the_value() -> None:
    seen = []

    def make(module: nn.Module) -> None:
        module.weight = nn.Parameter(torch.randn(3))
        seen.append(module.weight.tolist())

    assert values(lambda: Custom(make))["weight"].tolist() == seen[0]
    assert values(lambda: Custom(make))["weight"].tolist() == seen[0]


def test_explicit_devices_stay_real_and_libraries_do_not_see_a_meta_default() -> None:
    with InitRecorder(1):
        assert not torch.zeros(2, device="cpu").is_meta
        assert torch.zeros(2, device="meta").device.type == "meta"
        assert torch.tensor([]).device == torch.get_default_device() == torch.device("cpu")
        with torch.device("meta"):
            assert torch.tensor([]).device.type == "meta"
    assert torch.zeros(1).device.type == "cpu"


def test_uninitialised_parameter_is_named() -> None:
    def make(module: nn.Module) -> None:
        module.inner = Custom(lambda inner: setattr(inner, "table", nn.Parameter(torch.empty(3, 4))))
        module.fine = nn.Linear(2, 2)

    with pytest.raises(ModuleError, match=r"initialisation for 'inner.table'") as error:
        record(lambda: Custom(make))
    assert "configure_model()" in str(error.value)


def test_buffers_never_written_are_zero_and_equal_everywhere() -> None:
    drawn = values(lambda: Custom(lambda module: module.register_buffer("cache", torch.empty(3))))
    assert torch.equal(drawn["cache"], torch.zeros(3))


def test_modules_made_on_meta_elsewhere_are_reset_by_their_own_method() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.MultiheadAttention(4, 2))
    recorder = InitRecorder(1)
    tape = recorder.tape(module)
    assert torch.equal(tape.value("1.running_var"), torch.ones(4))
    assert 0 < tape.value("0.weight").abs().max() <= 0.5
    assert torch.equal(tape.value("2.in_proj_bias"), torch.zeros(12))


def test_a_buffer_made_on_meta_elsewhere_is_an_error() -> None:
    module = nn.Module()
    module.register_buffer("frequencies", torch.ones(3, device="meta"))
    with pytest.raises(ModuleError, match="'frequencies'"):
        InitRecorder(1).tape(module)


def test_lazy_modules_are_refused_by_name() -> None:
    with pytest.raises(ModuleError, match=r"'0.weight' has no shape yet"):
        record(lambda: nn.Sequential(nn.LazyLinear(3)))


def test_skipped_initialisation_is_found() -> None:
    _, tape = record(lambda: nn.Sequential(skip_init(nn.Linear, 3, 3, device="meta")))
    assert tape.value("0.weight").abs().sum() > 0
