"""Which module computes the attention: chosen by name, once, with no silent fallback."""

from collections.abc import Iterable
from importlib import import_module
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from glm5.errors import BackendError, MegatronCoreError
from glm5.ops.indexer_kl.inputs import SumOverRanks
from glm5.runtime.megatron_core import PINNED, probe_core


class Backend(Protocol):
    """What a backend module offers; the functions' docstrings in torch_backend are the contract."""

    def select_topk(
        self, q: Tensor, k: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, topk: int
    ) -> Tensor:
        """Select keys: -> topk_indices [t_q, topk] int32, ascending, -1 only at the tail."""

    def sparse_mla(
        self,
        q: Tensor,
        kv: Tensor,
        topk_indices: Tensor,
        softmax_scale: float,
        d_v: int,
        *,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor]:
        """Attend to the selected keys: -> out [t_q, h, d_v], lse [t_q, h].

        deterministic: the gradients have the same bits every time; BackendError where they cannot.
        """

    def sparse_mla_with_mass(
        self,
        q: Tensor,
        kv: Tensor,
        topk_indices: Tensor,
        softmax_scale: float,
        d_v: int,
        *,
        deterministic: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same and the attention to each key over all heads: -> out, lse, mass [t_q, topk]."""

    def indexer_kl(
        self,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        topk_indices: Tensor,
        mass: Tensor,
    ) -> Tensor:
        """The loss that trains the indexer, over selected keys: -> kl [t_q] fp32."""

    def indexer_kl_dense(
        self,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        q: Tensor,
        kv: Tensor,
        lse: Tensor,
        softmax_scale: float,
        starts: Tensor,
        ends: Tensor,
        *,
        sum_over_ranks: SumOverRanks | None = None,
    ) -> Tensor:
        """The loss that warms the indexer up, over all keys in range: -> kl [t_q] fp32."""


class BackendStatus(NamedTuple):
    """Whether a backend can run here; the reason says why not, and is empty otherwise."""

    name: str
    available: bool
    reason: str


class _Entry(NamedTuple):
    module: str
    remedy: str
    needs_cuda: bool = False
    needs_hopper: bool = False
    needs_core: str = ""
    """The field of MegatronCore that says whether the installed release has its functions."""


_BACKENDS = {
    "torch": _Entry("glm5.ops.torch_backend", "install torch"),
    "triton": _Entry("glm5.ops.triton_backend", 'use the backend "torch"', needs_cuda=True),
    "tilelang": _Entry(
        "glm5.ops.tilelang_backend",
        "pip install tilelang==0.1.15, on a machine with an NVIDIA GPU",
        needs_cuda=True,
        needs_core="tilelang_kernels",
    ),
    "cudnn": _Entry(
        "glm5.ops.cudnn_backend",
        "pip install nvidia-cudnn-frontend==1.32.0, on a machine with an NVIDIA Hopper GPU",
        needs_cuda=True,
        needs_hopper=True,
    ),
    "megatron": _Entry(
        "glm5.ops.peers", f"pip install megatron-core=={PINNED}", needs_core="dsa_functions"
    ),
}
_HOPPER = "an NVIDIA Hopper GPU: compute capability (9, 0)"
_DEFAULTS = {"cpu": "torch", "cuda": "triton"}


def get_backend(name: str) -> Backend:
    """The backend module of that name, imported now and not before.

    Raises BackendError when the name is unknown, or when the backend cannot run here, and
    MegatronCoreError where it is made of a Megatron-Core that is not known.
    """
    if name not in _BACKENDS:
        raise BackendError("unknown attention backend", got=name, expected=_listed(_BACKENDS))
    entry = _BACKENDS[name]
    _check_device(name, entry)
    _check_core(name, entry)
    try:
        return cast(Backend, import_module(entry.module))
    except (ImportError, OSError) as error:
        raise BackendError(
            f"the attention backend {name!r} cannot run here", got=error, remedy=entry.remedy
        ) from error


def _check_device(name: str, entry: _Entry) -> None:
    if not entry.needs_cuda:
        return
    if not torch.cuda.is_available():
        got = "no CUDA device"
    elif entry.needs_hopper and (found := torch.cuda.get_device_capability()) != (9, 0):
        got = f"compute capability {found}"
    else:
        return
    raise BackendError(
        f"the attention backend {name!r} cannot run here",
        got=got,
        expected=_HOPPER if entry.needs_hopper else "an NVIDIA GPU",
        remedy=entry.remedy,
    )


def _check_core(name: str, entry: _Entry) -> None:
    if not entry.needs_core:
        return
    core = probe_core()
    if getattr(core, entry.needs_core):
        return
    raise BackendError(
        f"the attention backend {name!r} cannot run here",
        got=f"megatron-core {core.version}, which does not have its functions ({entry.needs_core})",
        expected="megatron-core 0.19, the first with them",
        remedy=f'pip install megatron-core=={PINNED}, or use the backend "triton" or "torch"',
    )


def default_backend(device_type: str) -> str:
    """Name of the backend that is used on "cpu" or "cuda" when none is asked for.

    Raises BackendError for any other device type.
    """
    if device_type not in _DEFAULTS:
        raise BackendError(
            "no default attention backend for this device",
            got=device_type,
            expected=_listed(_DEFAULTS),
            remedy="name a backend",
        )
    return _DEFAULTS[device_type]


def backend_report() -> list[BackendStatus]:
    """Try every backend; importing them takes seconds."""
    return [_status(name) for name in _BACKENDS]


def _status(name: str) -> BackendStatus:
    try:
        get_backend(name)
    except (BackendError, MegatronCoreError) as error:
        return BackendStatus(name, False, str(error))
    return BackendStatus(name, True, "")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
