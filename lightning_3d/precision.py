"""Precision over a mesh: Lightning's choices, one loss scale for all ranks, and FSDP2's master weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from lightning.fabric.utilities.types import Optimizable, Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from lightning_3d.errors import ConfigError, nearest

PRECISIONS = ("32-true", "64-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed", "bf16-master")
_MASTER = "bf16-master"
_SCALED = "16-mixed"


class Clipper(Protocol):
    """Clips the gradients of some parameters over the whole mesh."""

    def by_norm(self, parameters: Sequence[Tensor], value: float) -> Tensor:
        """Scales them to a norm of at most ``value`` and returns the norm before."""

    def by_value(self, parameters: Sequence[Tensor], value: float) -> None:
        """Clamps each element to [-value, value]."""


class Mesh3DPrecision(Precision):
    """The precision of a run on a mesh.

    All names but one are Lightning's and mean what they mean there. ``"bf16-master"`` is FSDP2's mixed precision:
    parameters are fp32 shards that the optimizer updates; they are gathered and computed with in bf16, and gradients
    are reduced in fp32. It is not ``"bf16-mixed"``, which is autocast on fp32 parameters.

    Args:
        precision: One of ``PRECISIONS``.
        scaler: For ``"16-mixed"``: takes over this scaler's settings, such as its first scale.

    Raises:
        ConfigError: The name is unknown, or a scaler is given to a precision that has none.
    """

    def __init__(self, precision: str = "32-true", scaler: GradScaler | None = None) -> None:
        if precision not in PRECISIONS:
            close = nearest(str(precision), PRECISIONS)
            fix = f'Mesh3DPrecision("{close}")' if close else None
            raise ConfigError(f"precision={precision!r} does not exist.", valid=PRECISIONS, fix=fix)
        if scaler is not None and precision != _SCALED:
            raise ConfigError(
                f"precision={precision!r} does not scale the loss, but a scaler was given.", valid=_SCALED
            )
        self.precision: Any = precision
        self.scaler: GradScaler | None = None
        self._scaler_settings = _scaler_settings(scaler)
        self._clipper: Clipper | None = None
        # Called between a backward and the hooks that see its gradients.
        self.before_backward_hooks: Callable[[], None] = _nothing
        self.before_step: Callable[[Any], None] = _nothing
        # Around a backward, inside the hooks before and after it.
        self.backward_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._inner = _lightning_precision(precision, "cpu")

    @classmethod
    def from_lightning(cls, plugin: Precision) -> Mesh3DPrecision:
        """Returns the mesh's form of the plugin that Lightning chose for ``Trainer(precision=...)``.

        Raises:
            ConfigError: The plugin is of a kind that has no form on a mesh.
        """
        if isinstance(plugin, cls):
            return plugin
        plain = type(plugin) in (Precision, DoublePrecision, HalfPrecision, MixedPrecision)
        if not plain or plugin.precision not in PRECISIONS:
            raise ConfigError(
                f"{type(plugin).__name__} (precision={plugin.precision!r}) does not work with Mesh3DStrategy.",
                valid=PRECISIONS,
                fix='Trainer(precision="bf16-mixed") or plugins=Mesh3DPrecision("bf16-master")',
            )
        return cls(str(plugin.precision), scaler=getattr(plugin, "scaler", None))

    @property
    def shards_cast(self) -> bool:
        """Whether parameters are cast as they gather, so that an engine must gather them even on one rank."""
        return bool(self.precision == _MASTER)

    def step_context(self, stage: str) -> AbstractContextManager[Any]:
        """Returns the context of a step: of "training", "validation", "test" or "predict"."""
        contexts = {
            "training": self.train_step_context,
            "validation": self.val_step_context,
            "test": self.test_step_context,
            "predict": self.predict_step_context,
        }
        return contexts[stage]()

    def fsdp_policy(self) -> MixedPrecisionPolicy:
        """Returns FSDP2's dtypes of gathered parameters and of reductions."""
        if not self.shards_cast:
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def join_mesh(self, device_type: str, group: dist.ProcessGroup | None, clipper: Clipper) -> None:
        """Ties the precision to a mesh: the device of its casts, the ranks that share one loss scale, and clipping.

        Args:
            device_type: ``"cpu"``, ``"cuda"``, ...
            group: All ranks of the mesh; None in a single process.
            clipper: Clips over the mesh.
        """
        self._clipper = clipper
        self._inner = _lightning_precision(str(self.precision), device_type)
        if self.precision == _SCALED:
            settings = self._scaler_settings
            self.scaler = (
                GradScaler(device_type, **settings)
                if group is None
                else MeshGradScaler(device_type, process_group=group, **settings)
            )

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return self._inner.convert_module(module)

    @override
    def convert_input(self, data: Any) -> Any:
        return self._inner.convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        return self._inner.convert_output(data)

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return self._inner.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self._inner.module_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[Any]:
        return self._inner.forward_context()

    def scaled(self, loss: Tensor) -> Tensor:
        """Returns the loss times the loss scale; itself where there is none."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        return super().pre_backward(self.scaled(tensor), module)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Steppable | None, *args: Any, **kwargs: Any
    ) -> None:
        with self.backward_context():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        self.before_backward_hooks()
        with _WholeNumbers():
            return super().post_backward(tensor, module)

    @override
    def _after_closure(self, model: LightningModule, optimizer: Steppable) -> None:
        with _WholeNumbers():
            super()._after_closure(model, optimizer)
        self.before_step(optimizer)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizable, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise ConfigError("LBFGS calls its closure several times a step, which a loss scale cannot follow.")
        result = closure()
        skipped = result is None and model.automatic_optimization
        if not skipped:
            self.scaler.unscale_(optimizer)  # type: ignore[arg-type]
        self._after_closure(model, optimizer)
        if skipped:
            return result
        stepped = self.scaler.step(optimizer, **kwargs)  # type: ignore[arg-type]
        self.scaler.update()
        return stepped

    @override
    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType | Literal["norm", "value"] = GradClipAlgorithmType.NORM,
    ) -> None:
        if not clip_val or clip_val <= 0:
            return
        parameters = list(self.main_params(optimizer))
        # The clipper reads parts itself and returns whole numbers; the hooks' mode would only slow it down.
        with torch._C.DisableTorchFunction():
            self._clip(parameters, gradient_clip_algorithm, float(clip_val))

    def _clip(self, parameters: list[nn.Parameter], algorithm: Any, value: float) -> None:
        assert self._clipper is not None, "the strategy joins the mesh before training"
        if GradClipAlgorithmType(algorithm) == GradClipAlgorithmType.VALUE:
            self._clipper.by_value(parameters, value)
        else:
            self._clipper.by_norm(parameters, value)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {} if self.scaler is None else self.scaler.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.scaler is not None and state_dict:
            self.scaler.load_state_dict(state_dict)


class _WholeNumbers(TorchFunctionMode):
    """Around hooks that look at gradients: a number made from parts, such as a norm, is that of the whole.

    Torch would leave it pending in a DTensor, which cannot be logged or put in a plain tensor. Every rank must make it.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.full_tensor() if isinstance(result, DTensor) and result.dim() == 0 else result


class MeshGradScaler(ShardedGradScaler):
    """torch's scaler for sharded gradients, here for the gradients of FSDP2: an overflow on one rank is one for all.

    Every optimizer is unscaled before its step, fused ones included: these would look at their own rank's gradients
    only, and could not be clipped. A rank of a pipeline may have no gradient, and no loss that it could have scaled.
    """

    @override
    def unscale_(self, optimizer: Optimizer) -> None:
        if self._enabled and self._scale is None:
            self.scale(torch.zeros((), device=self._device))
        super().unscale_(optimizer)

    @override
    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool = True
    ) -> dict[torch.device, Tensor]:
        for gradients in _by_device_and_dtype(optimizer):
            here = torch.zeros_like(found_inf, device=gradients[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, here, inv_scale.to(here.device))
            found_inf.add_(here.to(found_inf.device))
        # One answer, whatever devices have gradients here: every rank reduces as many.
        return {found_inf.device: found_inf}

    @override
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.READY:
            self.unscale_(optimizer)
        result: float | None = self._maybe_opt_step(optimizer, state, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result


def _by_device_and_dtype(optimizer: Optimizer) -> list[list[Tensor]]:
    """The local gradients of an optimizer, grouped as torch's unscaling kernel wants them."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                groups.setdefault((local.device, local.dtype), []).append(local.detach())
    return list(groups.values())


def _scaler_settings(scaler: GradScaler | None) -> dict[str, Any]:
    if scaler is None:
        return {}
    return {
        "init_scale": scaler.get_scale(),
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "enabled": scaler.is_enabled(),
    }


def _lightning_precision(precision: str, device_type: str) -> Precision:
    """Lightning's own plugin for a precision, for its contexts and conversions."""
    if precision == "64-true":
        return DoublePrecision()
    if precision in ("bf16-true", "16-true"):
        return HalfPrecision(precision)  # type: ignore[arg-type]
    if precision == "bf16-mixed":
        return MixedPrecision("bf16-mixed", device_type)
    if precision == _SCALED:
        # The loss is scaled here, over the mesh; Lightning's plugin only casts.
        return MixedPrecision("16-mixed", device_type, scaler=GradScaler(device_type, enabled=False))
    return Precision()


def _nothing(*args: Any) -> None:
    """For a precision that nobody waits for."""
