"""Starts the process group and Megatron-Core's parallel state for one process or many."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from glm5.errors import ConfigError, LayoutError
from glm5.runtime.failures import DEFAULT_TIMEOUT_MINUTES
from glm5.runtime.megatron_core import complete_core
from glm5.runtime.stand_in import STAND_IN


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes of the parallel axes; the data-parallel size is what remains of the world."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Pipeline stages of every rank; above 1 they are interleaved."""
    cp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def splits_model(self) -> bool:
        """Whether one process holds less than the whole model."""
        return max(self.tp, self.pp, self.ep, self.etp) > 1


def default_device() -> torch.device:
    """The GPU of this process (under a launcher, of its local rank), else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if dist.is_torchelastic_launched():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    return torch.device("cuda", torch.cuda.current_device())


def checked_device(device: torch.device | str) -> torch.device:
    """The device that was asked for, if a model can be built there.

    Raises:
        ConfigError: neither the CPU nor this process's GPU.
    """
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            "this is no device", got=repr(device), expected='"cpu", "cuda"'
        ) from error
    if place.type not in ("cpu", "cuda"):
        raise ConfigError("this device is not supported", got=place, expected='"cpu", "cuda"')
    if place.type == "cpu":
        return place
    if not torch.cuda.is_available():
        raise ConfigError(
            "there is no CUDA device here",
            got=place,
            remedy="leave the device out: the default is what the machine has",
        )
    current = torch.cuda.current_device()
    if place.index not in (None, current):
        raise ConfigError(
            "a process computes on its current GPU alone",
            got=place,
            expected=f"cuda:{current}",
            remedy="call torch.cuda.set_device first",
        )
    return torch.device("cuda", current)


def ensure_distributed(
    device: torch.device,
    layout: Layout | None = None,
    *,
    seed: int = 0,
    timeout_minutes: float = DEFAULT_TIMEOUT_MINUTES,
) -> None:
    """Initialises torch.distributed and Megatron's parallel state unless the caller has done so.

    Without a launcher (no RANK in the environment) this is one process with a local store. A
    parallel state that exists is used as it is; asking for another layout over it is an error.
    A process that waits for another one in a collective gives up after `timeout_minutes`.

    Raises:
        LayoutError: the sizes do not divide the world, or differ from the state that exists.
    """
    from megatron.core import parallel_state, tensor_parallel

    complete_core()
    if device.type == "cpu":
        from glm5.runtime.cpu import enable_cpu_runtime

        enable_cpu_runtime()
    if not dist.is_initialized():
        _init_process_group(device, timedelta(minutes=timeout_minutes))
    if parallel_state.model_parallel_is_initialized():
        _check_existing(layout)
    else:
        _init_parallel_state(layout or Layout(), timeout_minutes)
        tensor_parallel.model_parallel_cuda_manual_seed(seed)


def _init_process_group(device: torch.device, timeout: timedelta) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend, timeout=timeout)
        return
    store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True, use_libuv=True)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def check_world_size(layout: Layout, world_size: int) -> None:
    """Whether so many processes can take the layout.

    Raises:
        LayoutError: the sizes do not divide the world, or exclude each other.
    """
    if layout.vpp > 1 and layout.pp == 1:
        raise LayoutError(
            "stages cannot be interleaved on one pipeline rank",
            got=f"vpp {layout.vpp} with pp 1",
            remedy="raise pp, or set vpp to 1",
        )
    model_size = layout.tp * layout.pp * layout.cp
    if world_size % model_size or world_size % (layout.ep * layout.etp * layout.pp):
        raise LayoutError(
            "the layout does not divide the processes",
            got=f"{layout} on {world_size} process(es)",
            expected="tp*pp*cp and ep*etp*pp each divide the number of processes",
            remedy="start another number of processes or change the layout",
        )


def _init_parallel_state(layout: Layout, timeout_minutes: float) -> None:
    from megatron.core import parallel_state

    check_world_size(layout, dist.get_world_size())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        # any number of minutes will do
        distributed_timeout_minutes=timeout_minutes,
        create_gloo_process_groups=has_gloo_groups(),
    )


def has_gloo_groups() -> bool:
    """Whether ranks can also meet on their hosts: those of a simulated world have no peers."""
    return dist.get_backend() != STAND_IN


def current_layout() -> Layout:
    """The layout of the parallel state that is initialised."""
    from megatron.core import parallel_state

    return Layout(
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        vpp=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        cp=parallel_state.get_context_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def _check_existing(layout: Layout | None) -> None:
    if layout is None:
        return
    existing = current_layout()
    if existing != layout:
        raise LayoutError(
            "Megatron's parallel state is already initialised with another layout",
            got=layout,
            expected=existing,
            remedy="ask for the existing layout, or destroy the model parallel state first",
        )


def shut_down() -> None:
    """Ends what `ensure_distributed` started; nothing happens where nothing was started."""
    if dist.is_available() and dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
