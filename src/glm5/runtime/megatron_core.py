"""What differs between the Megatron-Core releases that are supported: found by asking this one.

The model's own modules need none of it: whatever stands in a Megatron spec is a class, and every
release builds those alike. What depends on the release is Megatron's own sparse attention (DSA).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Literal

import torch

from glm5.errors import MegatronCoreError

SUPPORTED = ">=0.16,<0.20"
PINNED = "0.19.2"
RopeSlice = Literal["first", "last"]

_DSA = "megatron.core.transformer.experimental_attention_variant"
_SPECS = "megatron.core.models.gpt.experimental_attention_variant_module_specs"
# What the backend "megatron" is made of.
_FUNCTIONS = (
    (f"{_DSA}.dsa", "_compute_index_scores"),
    (f"{_DSA}.dsa", "_unfused_absorbed_dsa_fn"),
    (f"{_DSA}.dsa_indexer_loss", "indexer_kl_per_row"),
    (f"{_DSA}.dsa_indexer_loss", "normalize_indexer_target"),
    (f"{_DSA}.dsa_masking", "masked_log_softmax"),
)
# What the backend "tilelang" needs beside those of the loss; importing them needs tilelang.
_KERNEL_MODULES = ("indexer", "sparse_mla", "tilelang_indexer_fwd", "tilelang_indexer_loss")


@dataclass(frozen=True, kw_only=True)
class MegatronCore:
    """What the installed Megatron-Core does, as `probe_core` found it."""

    version: str
    spec_parts: Literal["ModuleSpec", "function"]
    """What Megatron's own specs hold for the MLP of a layer."""
    mtp_layer: Literal["transformer_layer", "mtp_model_layer"]
    """Attribute of Megatron's own MTP layer that holds its decoder layer."""
    dsa_attention: str
    """Class of Megatron's own attention around DSA."""
    dsa_in_block_specs: bool
    """Whether Megatron's block specs know the variant "dsa"."""
    fuse_input_layernorm: bool | None
    """What the DSA spec says of the norm before the attention; None: nothing, and no block spec can
    be made of it."""
    latent_norms: Literal["fused", "own"]
    """Whether the norms of the latents are part of the up-projections, so that the indexer sees the
    query latent before its norm, or modules of their own."""
    indexer_rope: RopeSlice
    """Which dimensions of an indexer head Megatron's own indexer rotates."""
    dsa_functions: bool
    """Whether it has the functions of the backend "megatron"."""
    tilelang_kernels: bool
    """Whether it has the kernels of the backend "tilelang"."""


@cache
def probe_core() -> MegatronCore:
    """Asks the installed Megatron-Core; the first call imports it.

    Raises:
        MegatronCoreError: it answers in a way that no supported release does.
    """
    try:
        return MegatronCore(
            version=version("megatron-core"),
            **_layers(),
            **_dsa_spec(),
            indexer_rope=_rotated_dims(),
            dsa_functions=all(_has(module, name) for module, name in _FUNCTIONS),
            tilelang_kernels=_has_kernels(),
        )
    except (ImportError, AttributeError, TypeError, ValueError, KeyError) as error:
        if isinstance(error, MegatronCoreError):
            raise
        raise _unknown(f"{type(error).__name__}: {error}") from error


def complete_core() -> None:
    """Defines the one name that a release uses and defines only beside Transformer Engine.

    Without it the router of 0.16 stops with a NameError; None is what later releases define.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _unknown(got: str) -> MegatronCoreError:
    return MegatronCoreError(
        "this Megatron-Core is not one whose sparse attention (DSA) is known",
        got=f"megatron-core {version('megatron-core')}: {got}",
        expected=f"megatron-core{SUPPORTED}",
        remedy=f"pip install megatron-core=={PINNED}",
    )


def _layers() -> dict[str, Any]:
    from megatron.core.transformer.mlp import MLP
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionLayerSubmodules,
    )

    names = {field.name for field in fields(MultiTokenPredictionLayerSubmodules)}
    found = names & {"transformer_layer", "mtp_model_layer"}
    if len(found) != 1:
        raise _unknown(f"an MTP layer of {sorted(names)}")
    return {
        "spec_parts": "function" if hasattr(MLP, "as_mlp_submodule") else "ModuleSpec",
        "mtp_layer": found.pop(),
    }


class _Parts:
    """Stands for Megatron's linears and norms, of which only the place in a spec matters."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: name


def _dsa_spec() -> dict[str, Any]:
    from megatron.core.transformer.identity_op import IdentityOp

    specs = import_module(_SPECS)
    config = SimpleNamespace(
        experimental_attention_variant="dsa",
        multi_latent_attention=True,
        qk_l2_norm=False,
        qk_layernorm=True,
        normalization="RMSNorm",
    )
    spec = specs.get_dsa_module_spec_for_backend(config, _Parts())
    latent_norm, up = spec.submodules.q_layernorm, spec.submodules.linear_q_up_proj
    kinds = {
        (True, "column_parallel_layer_norm_linear"): "fused",
        (False, "column_parallel_linear"): "own",
    }
    kind = kinds.get((latent_norm is IdentityOp, up))
    if kind is None:
        raise _unknown(f"query latents of {latent_norm} and {up}")
    return {
        "dsa_attention": spec.module.__name__,
        "dsa_in_block_specs": _knows_dsa(specs, config),
        "fuse_input_layernorm": spec.metainfo.get("fuse_input_layernorm"),
        "latent_norms": kind,
    }


def _knows_dsa(specs: Any, config: Any) -> bool:
    try:
        specs.get_experimental_attention_variant_module_spec(config, _Parts())
    except ValueError:
        return False
    return True


def _rotated_dims() -> RopeSlice:
    """Rotates a head of four dimensions by its own function and sees which two changed."""
    from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer

    config = SimpleNamespace(
        apply_rope_fusion=False,
        rotary_interleaved=False,
        multi_latent_attention=True,
        dsa_indexer_rope_interleaved=True,
    )
    indexer = SimpleNamespace(
        index_head_dim=4,
        qk_pos_emb_head_dim=2,
        config=config,
        # any group will do: only packed rows are shared out
        pg_collection=SimpleNamespace(cp=object()),
    )
    head = torch.ones(1, 1, 1, 4)
    turned = DSAIndexer._apply_rope(indexer, head, torch.full((1, 1, 1, 2), 1.0), 1.0)
    changed = (turned != head).flatten().tolist()
    if changed == [True, True, False, False]:
        return "first"
    if changed == [False, False, True, True]:
        return "last"
    raise _unknown(f"an indexer that rotates {changed} of four dimensions")


def _has(module: str, name: str) -> bool:
    return find_spec(module) is not None and hasattr(import_module(module), name)


def _has_kernels() -> bool:
    if find_spec(f"{_DSA}.ops") is None:
        return False
    return all(find_spec(f"{_DSA}.ops.{module}") is not None for module in _KERNEL_MODULES)
