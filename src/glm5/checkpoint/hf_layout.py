"""Which tensors a Hugging Face `glm_moe_dsa` checkpoint holds, with shape and dtype; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from glm5.checkpoint.names import summarise
from glm5.errors import CheckpointError

if TYPE_CHECKING:
    from glm5.checkpoint.safetensors_io import TensorReader
    from glm5.config import Glm5Config


@dataclass(frozen=True, slots=True)
class HfTensor:
    """One tensor of the checkpoint; `quantisable` ones are float8 with scales in an FP8 release."""

    shape: tuple[int, ...]
    dtype: str
    quantisable: bool = False


def hf_tensors(config: Glm5Config) -> dict[str, HfTensor]:
    """Every tensor of the published checkpoint, MTP layers included, in model order.

    An indexer exists on "full" layers only; MTP layers are always full and sparse. The MTP
    embedding and output head are not shipped: they are the model's own. FP8 scales are not
    listed; an FP8 folder adds one `*.weight_scale_inv` per quantisable tensor.
    """
    dtype, hidden, vocab = config.dtype, config.hidden_size, config.vocab_size
    tensors = {"model.embed_tokens.weight": HfTensor((vocab, hidden), dtype)}
    for layer in range(config.num_layers_with_mtp):
        for name, tensor in _layer(config, layer):
            tensors[f"model.layers.{layer}.{name}"] = tensor
    tensors["model.norm.weight"] = HfTensor((hidden,), dtype)
    tensors["lm_head.weight"] = HfTensor((vocab, hidden), dtype)
    return tensors


def check_hf_tensors(reader: TensorReader, config: Glm5Config) -> bool:
    """Check names, shapes and kinds of dtype of a checkpoint; True where MTP is shipped.

    MTP layers may be absent as a whole (transformers drops them on saving), never in part.
    Raises CheckpointError with the first missing, unexpected, wrong-shaped or integer tensors.
    """
    expected = hf_tensors(config)
    found = set(reader.names())
    mtp = {name for name in expected if _layer_of(name) >= config.num_hidden_layers}
    if not mtp & found:
        expected = {name: tensor for name, tensor in expected.items() if name not in mtp}
    _raise_if_any("tensors that the config asks for are missing", expected.keys() - found)
    _raise_if_any("tensors that the config does not know", found - expected.keys())
    _check_shapes(reader, expected)
    return bool(mtp & found)


def _raise_if_any(what: str, names: set[str]) -> None:
    if names:
        raise CheckpointError(
            what,
            got=summarise(names),
            remedy="use the config.json that belongs to these files",
        )


def _check_shapes(reader: TensorReader, expected: Mapping[str, HfTensor]) -> None:
    for name, tensor in expected.items():
        if reader.shape(name) != tensor.shape:
            raise CheckpointError(
                f"{name} in {reader.file_of(name)} has the wrong shape",
                got=reader.shape(name),
                expected=tensor.shape,
                remedy="use the config.json that belongs to these files",
            )
        if not reader.dtype(name).is_floating_point:
            raise CheckpointError(
                f"{name} in {reader.file_of(name)} holds no weights",
                got=reader.dtype(name),
                expected="a floating-point dtype",
                remedy="use a BF16, FP32 or block-scaled FP8 release",
            )


def _layer_of(name: str) -> int:
    """The layer number in a name, -1 outside the layers."""
    parts = name.split(".")
    return int(parts[2]) if parts[1] == "layers" else -1


def _layer(config: Glm5Config, layer: int) -> Iterator[tuple[str, HfTensor]]:
    is_mtp = layer >= config.num_hidden_layers
    norm = HfTensor((config.hidden_size,), config.dtype)
    yield "input_layernorm.weight", norm
    yield from _attention(config)
    if is_mtp or config.indexer_types[layer] == "full":
        yield from _indexer(config)
    yield "post_attention_layernorm.weight", norm
    if is_mtp or config.mlp_layer_types[layer] == "sparse":
        yield from _sparse_mlp(config)
    else:
        yield from _gated_mlp(config, "mlp", config.intermediate_size)
    if is_mtp:
        yield from _mtp_extras(config)


def _attention(c: Glm5Config) -> Iterator[tuple[str, HfTensor]]:
    heads = c.num_attention_heads
    prefix = "self_attn"
    yield _linear(c, f"{prefix}.q_a_proj", c.q_lora_rank, c.hidden_size)
    yield f"{prefix}.q_a_layernorm.weight", HfTensor((c.q_lora_rank,), c.dtype)
    yield _linear(c, f"{prefix}.q_b_proj", heads * c.qk_head_dim, c.q_lora_rank)
    kv_rows = c.kv_lora_rank + c.qk_rope_head_dim
    yield _linear(c, f"{prefix}.kv_a_proj_with_mqa", kv_rows, c.hidden_size)
    yield f"{prefix}.kv_a_layernorm.weight", HfTensor((c.kv_lora_rank,), c.dtype)
    kv_out = heads * (c.qk_nope_head_dim + c.v_head_dim)
    yield _linear(c, f"{prefix}.kv_b_proj", kv_out, c.kv_lora_rank)
    yield _linear(c, f"{prefix}.o_proj", c.hidden_size, heads * c.v_head_dim)


def _indexer(c: Glm5Config) -> Iterator[tuple[str, HfTensor]]:
    prefix = "self_attn.indexer"
    yield _linear(c, f"{prefix}.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
    yield _linear(c, f"{prefix}.wk", c.index_head_dim, c.hidden_size)
    yield f"{prefix}.k_norm.weight", HfTensor((c.index_head_dim,), c.dtype)
    yield f"{prefix}.k_norm.bias", HfTensor((c.index_head_dim,), c.dtype)
    weights_proj = HfTensor((c.index_n_heads, c.hidden_size), c.dtype)
    yield f"{prefix}.weights_proj.weight", weights_proj


def _sparse_mlp(c: Glm5Config) -> Iterator[tuple[str, HfTensor]]:
    yield "mlp.gate.weight", HfTensor((c.n_routed_experts, c.hidden_size), c.dtype)
    # transformers keeps this buffer in fp32 whatever the checkpoint's dtype is.
    yield "mlp.gate.e_score_correction_bias", HfTensor((c.n_routed_experts,), "float32")
    for expert in range(c.n_routed_experts):
        yield from _gated_mlp(c, f"mlp.experts.{expert}", c.moe_intermediate_size)
    shared_width = c.moe_intermediate_size * c.n_shared_experts
    yield from _gated_mlp(c, "mlp.shared_experts", shared_width)


def _gated_mlp(c: Glm5Config, prefix: str, width: int) -> Iterator[tuple[str, HfTensor]]:
    yield _linear(c, f"{prefix}.gate_proj", width, c.hidden_size)
    yield _linear(c, f"{prefix}.up_proj", width, c.hidden_size)
    yield _linear(c, f"{prefix}.down_proj", c.hidden_size, width)


def _mtp_extras(c: Glm5Config) -> Iterator[tuple[str, HfTensor]]:
    norm = HfTensor((c.hidden_size,), c.dtype)
    yield "enorm.weight", norm
    yield "hnorm.weight", norm
    yield "eh_proj.weight", HfTensor((c.hidden_size, 2 * c.hidden_size), c.dtype)
    yield "shared_head.norm.weight", norm


def _linear(c: Glm5Config, module: str, rows: int, columns: int) -> tuple[str, HfTensor]:
    return f"{module}.weight", HfTensor((rows, columns), c.dtype, quantisable=True)
