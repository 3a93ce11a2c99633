"""The part of the strategy that knows processes: degrees, launcher, process group, samplers and reductions."""

from __future__ import annotations

import atexit
import os
import time
from abc import abstractmethod
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.distributed import _destroy_dist_connection, _init_dist_connection
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_3d.config.schema import NEW_PROGRAMS, StrategyConfig
from lightning_3d.errors import MeshError
from lightning_3d.faults.agent import tell_agent, tell_agent_of
from lightning_3d.faults.report import add_note, is_consequence
from lightning_3d.faults.watch import FaultWatch
from lightning_3d.mesh.spec import MODEL_GROUP, MeshSpec
from lightning_3d.precision import Mesh3DPrecision
from lightning_3d.strategy.faults.memory import is_out_of_memory, memory_hint
from lightning_3d.strategy.faults.positions import Doing, tell_first

# What only a run needs is imported when it begins: naming the strategy should cost a program little.
if TYPE_CHECKING:
    from lightning_3d.strategy.faults.restarts import Restarts
    from lightning_3d.strategy.run import RunOnMesh

# Far longer than gloo's threads need, far shorter than a person notices.
_SECONDS_FOR_LAST_FREES = 0.1


class MeshStrategy(ParallelStrategy):
    """Processes on a mesh; what they do with a module is added by `SavingStrategy` and `Mesh3DStrategy`.

    Args:
        config: The checked options.
    """

    strategy_name = "mesh_3d"
    _connected: LightningModule | None = None
    _watch: FaultWatch | None = None
    _restarts: Restarts | None = None
    _told: BaseException | None = None

    def __init__(self, config: StrategyConfig) -> None:
        self.config = config
        self.num_nodes = 1
        self._spec: MeshSpec | None = None
        self._run: RunOnMesh | None = None
        self._doing = Doing()
        super().__init__()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Registers "mesh_3d" and "mesh_3d_zero0" to "mesh_3d_zero3" with Lightning's registry."""
        name = cls.strategy_name
        strategy_registry.register(name, cls, description="data x pipeline x tensor mesh")
        for stage in range(4):
            description = f"data x pipeline x tensor mesh, ZeRO stage {stage}"
            strategy_registry.register(f"{name}_zero{stage}", cls, description=description, zero_stage=stage)

    # ---- what the mesh is ----

    @property
    def is_distributed(self) -> bool:
        """Whether there are other data ranks; only then Lightning reduces what is logged with ``sync_dist``."""
        return self.data_size > 1

    @property
    def mesh_spec(self) -> MeshSpec:
        """Degrees, coordinates and groups of the mesh, known once the Trainer is built."""
        if self._spec is None:
            self._spec = MeshSpec.of(self.config, self.num_nodes * self.num_processes)
        return self._spec

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh with the axes "data_parallel", "pipeline_parallel" and "tensor_parallel".

        Raises:
            MeshError: Read before the processes have met.
        """
        return self._on_mesh.mesh

    @property
    def data_size(self) -> int:
        """Number of data ranks: ranks that see different samples."""
        return self.mesh_spec.data

    @property
    def data_rank(self) -> int:
        """This rank's position on the data axis."""
        return self.mesh_spec.coordinate(self.global_rank).data

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def process_group_backend(self) -> str:
        """Backend of the process group: gloo for the CPU, and beside nccl for objects and offloaded tensors."""
        default = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
        chosen = self.config.process_group_backend or default.get(self.root_device.type)
        return chosen or dist.get_default_backend_for_device(self.root_device)

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._connected

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        from lightning_3d.strategy.setup.refusals import refuse_compiled

        # The first that a strategy sees of a run; Lightning itself would refuse it next, without a way out.
        if module is not None:
            refuse_compiled(module)
        self._connected = module

    # ---- processes ----

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # None while the Trainer has not chosen: it takes anything else for the user's own choice.
        self._precision_plugin = None if precision_plugin is None else Mesh3DPrecision.from_lightning(precision_plugin)

    @property
    def _precision(self) -> Mesh3DPrecision:
        if self._precision_plugin is None:
            self._precision_plugin = Mesh3DPrecision()
        assert isinstance(self._precision_plugin, Mesh3DPrecision)
        return self._precision_plugin

    @override
    def _configure_launcher(self) -> None:
        from lightning_3d.strategy.launch.launcher import check_started, end_earlier_job

        assert self.cluster_environment is not None
        end_earlier_job()
        check_started(self.cluster_environment, self.num_processes, self.num_nodes)
        # Impossible degrees must be an error before the first child process starts.
        assert self.mesh_spec.world == self.num_nodes * self.num_processes
        if not self.cluster_environment.creates_processes_externally:
            self._launcher = self._own_launcher(self.cluster_environment)

    @abstractmethod
    def full_state_dict(self) -> dict[str, Any]:
        """Returns the module's whole state on the CPU, on every rank. Every rank must call it."""

    def _own_launcher(self, environment: ClusterEnvironment) -> _Launcher:
        """What starts the processes where nothing outside does."""
        from lightning_3d.strategy.launch.launcher import Mesh3DLauncher
        from lightning_3d.strategy.launch.spawning import Mesh3DProcessLauncher, start_method

        method = start_method(self.config.start_method)
        if method == NEW_PROGRAMS:
            return Mesh3DLauncher(environment, self.num_processes, self.num_nodes)
        return Mesh3DProcessLauncher(self, method, self.full_state_dict)

    def set_world_ranks(self) -> None:
        """Tells Lightning and the environment which rank this process is."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        # One function serves Lightning, Fabric and their utilities; it keeps the rank as an attribute.
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    @override
    def setup_environment(self) -> None:
        from lightning_3d.strategy.faults.replicas import share_generators
        from lightning_3d.strategy.faults.restarts import Restarts
        from lightning_3d.strategy.launch.meeting import lends_store, meet
        from lightning_3d.strategy.run import RunOnMesh, whole_world
        from lightning_3d.strategy.setup.callbacks import refuse_callbacks
        from lightning_3d.strategy.setup.program import check_same_program

        super().setup_environment()
        self.set_world_ranks()
        assert self.cluster_environment is not None
        if not dist.is_initialized():
            atexit.register(_end_processes)
        timeout = timedelta(seconds=self.config.timeout_seconds)
        met: dict[str, Any] = (
            {"store": meet("group", timeout)[0]} if lends_store() and not dist.is_initialized() else {}
        )
        _init_dist_connection(
            self.cluster_environment,
            self.process_group_backend,
            timeout=timeout,
            **met,
            device_id=self.root_device if self.root_device.type != "cpu" else None,
        )
        assert self.lightning_module is not None
        if self.world_size > 1:
            check_same_program(self.config, self.lightning_module, whole_world())
        if self._run is None:
            self._run = RunOnMesh(self.mesh_spec, self.root_device, self.config)
        if "PL_GLOBAL_SEED" in os.environ:
            # Seeded again, as Lightning's strategies do it, they would draw other numbers than one device does.
            share_generators(self._run.world_group)
        self._precision.join_mesh(self.root_device.type, self._run.shared_group, self._run.clipper)
        self.lightning_module._device_mesh = self._run.mesh
        if self.world_size > 1:
            trainer = self.lightning_module.trainer
            self._watch = FaultWatch(
                self._run.world_group, self.cluster_environment.main_address, partial(self._doing.position, trainer)
            )
            replicated = self.mesh_spec.size(MODEL_GROUP) == 1 and self.config.zero_stage == 0
            refuse_callbacks(trainer, cut=not replicated)
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._restarts = Restarts(self._run.world_group)
            self._restarts.begin_fit(self.lightning_module.trainer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Lets the other ranks know, those that wait in a collective by closing this rank's connections."""
        self._tell(exception)
        watch = self._watch
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.destroy_process_group()
        if watch is not None:
            fault = watch.first()
            tell_first(exception, fault, self.global_rank)
            if fault is not None and is_consequence(exception):
                tell_agent_of(fault)
        tell_agent(exception)

    def _tell(self, exception: BaseException) -> None:
        """Lets the other ranks know that this one fails, once, and the agent that has started it."""
        if self._told is exception:
            return
        self._told = exception
        if is_out_of_memory(exception):
            add_note(exception, memory_hint(self.config, self.mesh_spec))
        if self._watch is not None:
            self._watch.failed(exception)
        if not is_consequence(exception):
            tell_agent(exception)

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.close()
        self._watch = None

    @property
    def _on_mesh(self) -> RunOnMesh:
        if self._run is None:
            raise MeshError(
                "the mesh does not exist before the processes have met.",
                fix="read it in configure_model or later, or use strategy.mesh_spec for degrees and ranks",
            )
        return self._run

    # ---- what is reduced, and over whom ----

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over the data axis; anything else is returned as it is."""
        if not isinstance(tensor, Tensor):
            return tensor
        return self._on_mesh.collectives.reduce(tensor, group, "sum" if reduce_op is None else reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return self._on_mesh.collectives.gather(tensor, group, with_gradients=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return self._on_mesh.collectives.agree(decision, all_ranks=all)

    @override
    def barrier(self, name: str | None = None) -> None:
        if dist.is_initialized() and self.world_size > 1:
            dist.barrier(device_ids=[self.root_device.index] if self.root_device.type == "cuda" else None)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if not dist.is_initialized() or self.world_size == 1:
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]


def _end_processes() -> None:
    """Ends the process group while the interpreter is whole.

    A thread of gloo lets the tensors of the last collectives go a moment after these have ended. If the interpreter is
    gone by then, the process aborts instead of ending.
    """
    _destroy_dist_connection()
    time.sleep(_SECONDS_FOR_LAST_FREES)
