"""Recording initialisation: the user's code builds the module on the meta device, every write is written down."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from typing_extensions import Self

from lightning_3d.errors import ModuleError, few_and_more
from lightning_3d.initial.log import Constant, Operation, OperationLog, Window, allocates_only
from lightning_3d.initial.replay import CPU, InitTape, replay
from lightning_3d.initial.tensors import named_tensors
from lightning_3d.random.seeds import derive_seed

META = torch.device("meta")
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
_VALUES_OUT = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_REBINDING = frozenset({"aten::set_", "aten::resize_"})


class InitRecorder(TorchDispatchMode):
    """Builds modules on the meta device and records how their tensors are initialised.

    Use it around ``configure_model()``. Inside, a factory function without a device, or with the meta device, makes a
    meta tensor; constants (``torch.tensor([1., 2.])``) and real tensors that are copied into meta ones are recorded by
    reference; a value that Python needs (``.item()``, ``if``, ``.numpy()``) is answered by replaying what it depends
    on, on the CPU. A tensor made with another explicit device stays real.

    Args:
        seed: The run's seed, equal on all ranks.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._log = OperationLog()
        self._early: dict[int, int] = {}
        self._constants: dict[int, list[Constant]] = {}
        self._factories = _Factories(self)

    def __enter__(self) -> Self:
        self._factories.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._factories.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def tape(self, module: nn.Module) -> InitTape:
        """Binds the recording to the names of a module.

        Args:
            module: The module as it was built, before it is cut or replaced in any way.

        Returns:
            The tape that gives each initial value by name.

        Raises:
            ModuleError: If a parameter on the meta device has no recorded initialisation and none is known.
        """
        self._initialise_skipped(module)
        self._reset_unwritten(module)
        windows = {}
        open_names = []
        for name, tensor in named_tensors(module):
            if is_lazy(tensor):
                raise ModuleError(
                    f"parameter '{name}' has no shape yet (a lazy module).",
                    fix="give the module its input size, e.g. nn.Linear(in_features, ...) for nn.LazyLinear(...)",
                )
            if tensor.is_meta:
                windows[name] = Window.of(tensor)
                if not self._written(tensor):
                    open_names.append(name)
        if open_names:
            raise _uninitialised(open_names)
        return InitTape(self._log, windows, seed=self._seed, early=self._early)

    def real(self, tensor: Tensor) -> Tensor:
        """Gives the present value of a meta tensor that was made under this recorder."""
        return replay(self._log, Window.of(tensor), self._early_seed)

    def constant(self, tensor: Tensor) -> Tensor:
        """Makes a meta tensor that will hold a real tensor's values."""
        meta = _like(tensor)
        self._record(torch.ops.aten.copy_.default, (meta, tensor), {}, meta)
        return meta

    def whole(self, tensor: Tensor, function: Callable[..., Tensor], arguments: dict[str, Any]) -> None:
        """Records a call that fills a tensor as one operation.

        Args:
            tensor: The meta tensor that is filled.
            function: A function that returns it.
            arguments: The function's arguments by name, the tensor among them.
        """
        window = self._log.know(tensor)
        written = frozenset({window.storage})
        settles = written if window.covers(tensor.untyped_storage().nbytes()) else frozenset()
        self._log.append(
            Operation(
                function=function,
                args=(),
                kwargs=tree_map(self._recorded, arguments),
                results=(None,),
                reads=written - settles,
                writes=written,
                settles=settles,
                random=True,
                default_dtype=torch.get_default_dtype(),
            )
        )

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one operation on the meta device and writes it down, or answers it with real values."""
        kwargs = dict(kwargs or {})
        with torch._C.DisableTorchFunction():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if self._factories.legacy_constructor(func, kwargs):
                kwargs["device"] = META
            if not any(tensor.is_meta for tensor in tensors) and kwargs.get("device") != META:
                self._protect_constants(func, args, kwargs)
                return func(*args, **kwargs)
            # A generator of the user's cannot be wound back, so names decide here as well.
            kwargs.pop("generator", None)
            if self._needs_values(func, args, kwargs):
                return self._answer(func, args, kwargs)
            try:
                out = func(*tree_map_only(Tensor, _on_meta, args), **tree_map_only(Tensor, _on_meta, kwargs))
            except NotImplementedError:
                # The result's shape, or the answer itself, depends on the values.
                out = [*_changed(func, args, kwargs)]
                if not out:
                    return tree_map_only(Tensor, self.constant, self._answer(func, args, kwargs))
                out = out[0] if len(out) == 1 else out
            self._record(func, args, kwargs, out)
            return out

    def _needs_values(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        returns = func._schema.returns
        if returns and not any("Tensor" in str(returned.type) for returned in returns):
            return True
        device = kwargs.get("device")
        leaves_meta = device is not None and torch.device(device).type != "meta"
        return leaves_meta or any(not tensor.is_meta for tensor in _changed(func, args, kwargs))

    def _answer(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._protect_constants(func, args, kwargs)
        real_args, real_kwargs = tree_map_only(
            Tensor, lambda tensor: self.real(tensor) if tensor.is_meta else tensor, (args, kwargs)
        )
        return func(*real_args, **real_kwargs)

    def _record(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if func._schema.name in _REBINDING:
            return
        changed = [self._log.know(tensor) for tensor in _changed(func, args, kwargs)]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_meta]
        known = {Window.of(tensor).storage for tensor in inputs}
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        results = tuple(None if Window.of(output).storage in known else self._log.know(output) for output in outputs)
        created = frozenset(window.storage for window in results if window is not None)
        written = frozenset(window.storage for window in changed)
        if allocates_only(func) or not (created or written):
            return
        recorded_args, recorded_kwargs = tree_map(self._recorded, (args, kwargs))
        only_read = frozenset(Window.of(tensor).storage for tensor in _read(func, args, kwargs) if tensor.is_meta)
        settles = self._log.settled(func, changed)
        self._log.append(
            Operation(
                function=func,
                args=recorded_args,
                kwargs=recorded_kwargs,
                results=results,
                reads=only_read | (written - settles),
                writes=created | written,
                settles=created | settles,
                random=torch.Tag.nondeterministic_seeded in func.tags,
                default_dtype=torch.get_default_dtype(),
            )
        )

    def _recorded(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_meta:
            return self._log.know(value)
        constant = Constant(value.detach())
        self._constants.setdefault(value.untyped_storage()._cdata, []).append(constant)
        return constant

    def _protect_constants(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for tensor in _changed(func, args, kwargs):
            if not tensor.is_meta:
                for constant in self._constants.pop(tensor.untyped_storage()._cdata, ()):
                    constant.tensor = constant.tensor.clone()

    def _early_seed(self, index: int) -> int:
        return self._early.setdefault(index, derive_seed(self._seed, "initial", index))

    def _written(self, tensor: Tensor) -> bool:
        # A buffer made by torch.empty is scratch space; a parameter is not.
        storage = Window.of(tensor).storage
        scratch = storage in self._log.storages and not isinstance(tensor, nn.Parameter)
        return tensor.numel() == 0 or scratch or storage in self._log.writers

    def _initialise_skipped(self, module: nn.Module) -> None:
        # Transformers leave out their own initialisation under a `with torch.device("meta")` of the user's.
        for part in module.modules():
            known = any(base.__module__ == "transformers.modeling_utils" for base in type(part).__mro__)
            skipped = known and not any(hasattr(child, "_is_hf_initialized") for child in part.modules())
            if skipped and all(tensor.is_meta for tensor in part.parameters()):
                initialise: Any = part.initialize_weights
                with self:
                    initialise()

    def _reset_unwritten(self, module: nn.Module) -> None:
        # Children first, as in an eager run: some parents overwrite a part of theirs.
        for part in reversed([*module.modules()]):
            direct = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            own = [tensor for tensor in direct if tensor.is_meta and not is_lazy(tensor)]
            reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
            if own and callable(reset) and not any(self._written(tensor) for tensor in own):
                with self, torch.no_grad():
                    reset()


class _Factories(TorchFunctionMode):
    """Gives factory functions the meta device, and Python the values it asks for."""

    def __init__(self, recorder: InitRecorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._depth = 0

    def legacy_constructor(self, func: torch._ops.OpOverload, kwargs: dict[str, Any]) -> bool:
        """Tells whether an operation is ``torch.Tensor(3, 4)``, which no function mode sees and which has no device."""
        return self._depth == 0 and func._schema.name == "aten::empty" and kwargs.get("device") == CPU

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs one call of torch's Python interface."""
        kwargs = dict(kwargs or {})
        if func == _IS_META:
            return self._is_meta(args[0], inspect.currentframe())
        self._depth += 1
        try:
            return self._call(func, args, kwargs)
        finally:
            self._depth -= 1

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in _VALUES_OUT and args[0].is_meta:
            return func(self._recorder.real(args[0]), *args[1:], **kwargs)
        if func is Tensor.new_tensor and args[0].is_meta:
            func, args, kwargs = torch.tensor, args[1:], {"dtype": args[0].dtype, **kwargs}
        if func in _device_constructors() and kwargs.get("device") in (None, META, "meta"):
            if func not in _FROM_DATA:
                kwargs["device"] = META
            elif not any(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs))):
                return self._from_data(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_meta(self, tensor: Tensor, here: FrameType | None) -> bool:
        """Answers code that would skip the initialisation of a meta tensor: this one does have values."""
        asking = here.f_back if here is not None else None
        if tensor.is_meta and asking is not None and asking.f_globals is vars(init):
            # Recorded whole: some draw until their values fit, and those values depend on a name not known yet.
            code = asking.f_code
            names = set(code.co_varnames[: code.co_argcount]) - {"generator"}
            arguments = {name: asking.f_locals[name] for name in names}
            self._recorder.whole(tensor, getattr(init, code.co_name), arguments)
            return True
        return False

    def _from_data(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        requires_grad = bool(kwargs.pop("requires_grad", False))
        real = func(*args, **{**kwargs, "device": CPU})
        # Libraries ask torch.tensor([]).device whether initialisation is pointless. Here only a context of the user's
        # own makes it so.
        return self._recorder.constant(real).requires_grad_(requires_grad) if real.numel() else func(*args, **kwargs)


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else _like(tensor)


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


def _changed(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Finds the tensors that an operator writes to."""
    return _arguments(func, args, kwargs, written=True)


def _read(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Finds the tensors that an operator only reads."""
    return _arguments(func, args, kwargs, written=False)


def _arguments(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *, written: bool
) -> Iterator[Tensor]:
    for position, argument in enumerate(func._schema.arguments):
        if (argument.alias_info is not None and argument.alias_info.is_write) == written:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _uninitialised(names: list[str]) -> ModuleError:
    shown = few_and_more((f"'{name}'" for name in names), 5)
    return ModuleError(
        f"no recorded or known initialisation for {shown}: on the meta device, and nothing ever wrote to it.",
        fix="build the module inside configure_model() and initialise it there, e.g. with torch.nn.init.normal_(...), "
        "or give its module a reset_parameters() method; or build it in __init__ on the CPU",
    )
