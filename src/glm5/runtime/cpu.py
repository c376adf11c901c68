"""Megatron-Core on a machine without a GPU (gloo + CPU tensors).

Megatron-Core assumes CUDA in many places. `enable_cpu_runtime` answers each assumption here and
nowhere else; it is called explicitly, refuses to run where a GPU is present, and changes nothing
twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from glm5.errors import BackendError

_CPU = torch.device("cpu")
# Methods that may name a device without a keyword.
_ANSWERED = frozenset({torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.to})


class _CudaMeansCpu(TorchFunctionMode):
    """Redirects `device="cuda"` and `.cuda()` to the CPU: Megatron-Core writes both literally."""

    active = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if not kwargs and func not in _ANSWERED:
            # nearly all calls: this is on the way of every operation
            return func(*args)
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # the optimisers recognise dtypes by the name of the CUDA tensor type
            return func(*args).replace("torch.", "torch.cuda.")
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


class _Event:
    """A CUDA event on a device whose work is finished as soon as it is issued."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def record(self, stream: Any = None) -> None:
        del stream

    def wait(self, stream: Any = None) -> None:
        del stream

    def synchronize(self) -> None:
        """Nothing is pending on a CPU."""

    def query(self) -> bool:
        return True


class _Stream:
    """A CUDA stream on a device that runs everything in program order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        del args, kwargs

    def wait_stream(self, stream: Any) -> None:
        del stream

    def wait_event(self, event: Any) -> None:
        del event

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()

    def synchronize(self) -> None:
        """Nothing is pending on a CPU."""


_THE_STREAM = _Stream()
_MODE = _CudaMeansCpu()


def enable_cpu_runtime() -> None:
    """Makes Megatron-Core run on CPU tensors in this process; a second call does nothing.

    Raises:
        BackendError: a CUDA device is present, so the real runtime must be used.
    """
    if _MODE.active:
        return
    if torch.cuda.is_available():
        raise BackendError(
            "the CPU runtime was asked for on a machine with a GPU",
            got=f"{torch.cuda.device_count()} CUDA device(s)",
            expected="no CUDA device",
            remedy="run on the GPU, or hide it with CUDA_VISIBLE_DEVICES=''",
        )
    _answer_torch_cuda()
    _answer_megatron_rng()
    _answer_jit_fuser()
    _answer_transformer_engine()
    _MODE.active = True
    _MODE.__enter__()


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


@contextlib.contextmanager
def _stream_context(stream: Any) -> Iterator[None]:
    del stream
    yield


def _answer_torch_cuda() -> None:
    answers: dict[str, Any] = {
        # parameters, router buffers and gradient buffers are made on current_device()
        "current_device": lambda: _CPU,
        # DDP, the token dispatchers and the schedules order work with streams and events
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda device=None: _THE_STREAM,
        "default_stream": lambda device=None: _THE_STREAM,
        "stream": _stream_context,
        "synchronize": lambda device=None: None,
        # seeding goes through the CUDA generator
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        # the schedules and the timers ask for memory figures
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "empty_cache": lambda: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.random.get_rng_state = answers["get_rng_state"]


def _answer_megatron_rng() -> None:
    """The model-parallel random states and recompute fork the CUDA generator."""
    from megatron.core.tensor_parallel import random as megatron_random

    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _answer_jit_fuser() -> None:
    """Fused element-wise helpers are compiled on first use, which takes a minute on a CPU."""
    torch._dynamo.config.disable = True


def _answer_transformer_engine() -> None:
    """Where it is installed routers multiply with its kernel, which needs a GPU."""
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None
