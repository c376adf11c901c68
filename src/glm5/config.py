"""The model configuration: one frozen, validated object made from the raw config.json."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from glm5 import config_rules as rules
from glm5.config_file import find_config_file, read_config_file
from glm5.config_rules import IndexerType, MlpLayerType
from glm5.errors import ConfigError

Size = Annotated[int, Field(ge=1, lt=2**31)]
TokenId = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

DEFAULT_LATENT_NORM_EPS = 1e-6

# Written by some transformers releases and refused or misread by others.
_NOT_WRITTEN = ("layer_types", "num_experts", "mlp_bias", "output_router_logits")
# A null elsewhere is an absent key here, and an error in transformers.
_MAY_BE_NULL = (
    "bos_token_id",
    "eos_token_id",
    "index_topk_pattern",
    "pad_token_id",
    "rope_parameters",
    "rope_scaling",
)
# transformers takes no integer for these.
_FLOATS = ("initializer_range", "rms_norm_eps", "rope_theta", "routed_scaling_factor")

_STRICT = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)


class Fp8Quantization(BaseModel):
    """Block scales of an FP8 (e4m3) checkpoint: weight = float8 value * its block's scale."""

    model_config = _STRICT

    weight_block_size: tuple[Size, Size]
    """Rows and columns of one block; the last block of a matrix may be ragged."""
    modules_to_not_convert: tuple[str, ...] = ()
    """Modules that the release lists as kept in their dtype."""


class Glm5Config(BaseModel):
    """A GLM-5 family (glm_moe_dsa) model, in the spelling of its config.json.

    The layer schedule is expanded; MTP layers are always full and sparse and are not part of it.
    """

    model_config = _STRICT

    vocab_size: Annotated[int, Field(ge=2, lt=2**31)]
    """Rows of the token embedding and of the output layer."""
    hidden_size: Size
    """Width of the residual stream."""
    intermediate_size: Size
    """Inner width of a dense MLP."""
    moe_intermediate_size: Size
    """Inner width of one routed expert."""
    num_hidden_layers: Size
    """Decoder layers, without the MTP layers."""
    num_nextn_predict_layers: int = Field(default=0, ge=0)
    """Multi-token prediction (MTP) layers, stored after the decoder layers."""
    num_attention_heads: Size
    """Query heads of the main attention, which has one latent key-value head."""

    q_lora_rank: Size
    """Width of the query latent."""
    kv_lora_rank: Size
    """Width of the key-value latent."""
    qk_nope_head_dim: Size
    """Part of a query or key head that is not rotated."""
    qk_rope_head_dim: Size
    """Part of a query or key head that is rotated; `head_dim` in the file is never used."""
    v_head_dim: Size
    """Width of a value head."""

    n_routed_experts: Size
    """Routed experts of a sparse layer."""
    n_shared_experts: Size
    """Shared experts of a sparse layer; together they are one MLP of that many inner widths."""
    num_experts_per_tok: Size
    """Routed experts that each token goes to."""
    n_group: int = 1
    """Router groups; only 1, that is, ungrouped."""
    topk_group: int = 1
    """Router groups kept per token; only 1."""
    norm_topk_prob: bool = True
    """Router weights of a token are divided by their sum; only true."""
    routed_scaling_factor: Positive
    """Factor on the router weights after that division."""

    index_topk: Size
    """Keys that the indexer selects for each query."""
    index_n_heads: Size
    """Heads of the indexer."""
    index_head_dim: Size
    """Width of an indexer head, whose first `qk_rope_head_dim` dims are rotated."""
    indexer_types: tuple[IndexerType, ...]
    """Per decoder layer: `full` selects keys, `shared` reuses the last full layer's selection."""
    mlp_layer_types: tuple[MlpLayerType, ...]
    """Per decoder layer: one `dense` MLP, or the `sparse` mixture of experts."""

    rope_theta: Positive
    """Base of the rotary frequencies theta ** (-2 i / qk_rope_head_dim)."""
    rope_interleave: bool = True
    """Main attention rotates the pairs (0, 1), (2, 3), ...; only true."""
    indexer_rope_interleave: bool = True
    """The same for the indexer; false rotates the pairs (i, i + qk_rope_head_dim / 2)."""
    rms_norm_eps: Positive
    """Epsilon of the residual-stream norms."""
    latent_norm_eps: Positive = DEFAULT_LATENT_NORM_EPS
    """Epsilon of the query and key-value latent norms: 1e-6 in transformers whatever the file
    says, while serving engines use `rms_norm_eps`."""
    indexer_norm_eps: Positive = 1e-6
    """Epsilon of the indexer's key LayerNorm."""

    max_position_embeddings: Size
    """Longest sequence that the model is made for."""
    initializer_range: float = Field(default=0.02, ge=0, allow_inf_nan=False)
    """Standard deviation of freshly initialised weights."""
    dtype: Literal["bfloat16", "float32", "float16"]
    """Type of the checkpoint's weights, apart from those that stay fp32 or are stored as FP8."""
    eos_token_id: tuple[TokenId, ...]
    """Tokens that end a text."""
    pad_token_id: TokenId | None = None
    """Padding token, None when the model has none."""
    fp8: Fp8Quantization | None = None
    """Block scales of the checkpoint, None when it is not quantised."""
    hf_raw: dict[str, Any] = Field(repr=False)
    """The config.json as read; `to_hf_dict` writes it back."""

    @classmethod
    def from_hf(cls, dir_or_repo_id: str | Path) -> Self:
        """Read config.json from a local folder, or from a Hub repository (its cache if offline).

        Raises ConfigError, naming the file, when it is absent or describes no supported model.
        """
        path = find_config_file(dir_or_repo_id)
        raw = read_config_file(path)
        try:
            return cls.from_hf_dict(raw)
        except ConfigError as error:
            raise ConfigError(
                f"{path}: {error.what}",
                got=error.got,
                expected=error.expected,
                remedy=error.remedy,
            ) from error

    @classmethod
    def from_hf_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Read a parsed config.json; ConfigError when it describes no supported model."""
        rules.check_model_type(raw)
        fields = {name: raw[name] for name in cls.model_fields if raw.get(name) is not None}
        missing = [name for name in cls._copied_and_required() if name not in fields]
        if missing:
            raise ConfigError(
                "missing fields",
                got=f"no {', '.join(missing)}",
                expected="every size of the model",
                remedy="use the model's own config.json",
            )
        rules.check_supported_values(raw)
        rules.check_derived_values(raw)
        fields |= {
            "n_routed_experts": rules.read_n_routed_experts(raw),
            "indexer_types": rules.expand_indexer_types(raw),
            "mlp_layer_types": rules.expand_mlp_layer_types(raw),
            "rope_theta": rules.read_rope_theta(raw),
            "dtype": rules.read_dtype(raw),
            "eos_token_id": rules.read_eos_token_id(raw),
            "fp8": rules.read_fp8(raw),
            "hf_raw": copy.deepcopy(dict(raw)),
        }
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise _as_config_error(error) from error

    def to_hf_dict(self) -> dict[str, Any]:
        """The config.json of this model: the raw one, in the spelling that every reader takes.

        `latent_norm_eps` is added when it is not transformers' value, and `quantization_config`
        goes when `fp8` is None. Raises ConfigError when another field was changed after reading,
        since the raw file still has the old value: change the raw dict and read that instead.
        """
        written = _readable_by_all(self.hf_raw)
        written["n_routed_experts"] = self.n_routed_experts
        written.setdefault("num_key_value_heads", self.num_attention_heads)
        written.pop("latent_norm_eps", None)
        if self.latent_norm_eps != DEFAULT_LATENT_NORM_EPS:
            written["latent_norm_eps"] = self.latent_norm_eps
        if self.fp8 is None:
            written.pop("quantization_config", None)
        again = type(self).from_hf_dict(written)
        changed = [
            name
            for name in type(self).model_fields
            if name != "hf_raw" and getattr(again, name) != getattr(self, name)
        ]
        if changed:
            raise ConfigError(
                "fields were changed after the config was read",
                got=", ".join(f"{name} = {getattr(self, name)!r}" for name in changed),
                expected=", ".join(f"{name} = {getattr(again, name)!r}" for name in changed),
                remedy="change the raw dict and call Glm5Config.from_hf_dict on it",
            )
        return written

    def in_dtype(self, dtype: str) -> Self:
        """The same model with weights of another dtype; ConfigError when it is none."""
        raw = self.to_hf_dict()
        raw.pop("torch_dtype", None)
        return type(self).from_hf_dict(raw | {"dtype": dtype})

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head before absorption: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def d_qk(self) -> int:
        """Width of an absorbed query and of the latent key: kv_lora_rank + rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def d_v(self) -> int:
        """Width of the latent value: kv_lora_rank."""
        return self.kv_lora_rank

    @property
    def softmax_scale(self) -> float:
        """qk_head_dim ** -0.5, also for the absorbed attention."""
        return float(self.qk_head_dim**-0.5)

    @property
    def num_layers_with_mtp(self) -> int:
        """Decoder layers and MTP layers together, as the checkpoint numbers them."""
        return self.num_hidden_layers + self.num_nextn_predict_layers

    @classmethod
    def _copied_and_required(cls) -> list[str]:
        """Required fields that are read as they stand; the others have rules of their own."""
        ruled = {"n_routed_experts", "indexer_types", "mlp_layer_types", "rope_theta"}
        ruled |= {"dtype", "eos_token_id", "hf_raw"}
        return [n for n, f in cls.model_fields.items() if f.is_required() and n not in ruled]

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        for name in ("indexer_types", "mlp_layer_types"):
            _require(
                len(getattr(self, name)) == self.num_hidden_layers,
                f"{name} has the wrong length",
                got=len(getattr(self, name)),
                expected=f"num_hidden_layers = {self.num_hidden_layers}",
            )
        _require(
            self.indexer_types[0] == "full",
            "the first layer is shared, but no layer before it has selected keys",
            got=rules.spell(self.indexer_types),
            expected="a schedule that starts with a full layer (F)",
        )
        return self

    @model_validator(mode="after")
    def _check_router(self) -> Self:
        # Grouped or unnormalised routing is another computation.
        for name, only in (("n_group", 1), ("topk_group", 1), ("norm_topk_prob", True)):
            value = getattr(self, name)
            _require(value == only, f"unsupported {name}", got=value, expected=only)
        # Megatron-Core does not normalise the weight of a single expert, transformers does.
        _require(
            self.num_experts_per_tok > 1,
            "unsupported num_experts_per_tok",
            got=self.num_experts_per_tok,
            expected="at least 2",
        )
        _require(
            self.num_experts_per_tok <= self.n_routed_experts,
            "num_experts_per_tok is larger than n_routed_experts",
            got=self.num_experts_per_tok,
            expected=f"at most {self.n_routed_experts}",
        )
        return self

    @model_validator(mode="after")
    def _check_rope(self) -> Self:
        _require(self.rope_interleave, "unsupported rope_interleave", got=False, expected=True)
        _require(
            self.qk_rope_head_dim % 2 == 0,
            "qk_rope_head_dim is odd, but dims are rotated in pairs",
            got=self.qk_rope_head_dim,
            expected="an even number",
        )
        _require(
            self.index_head_dim >= self.qk_rope_head_dim,
            "an indexer head has no room for the rotated dims",
            got=f"index_head_dim {self.index_head_dim}",
            expected=f"at least qk_rope_head_dim = {self.qk_rope_head_dim}",
        )
        return self

    @model_validator(mode="after")
    def _check_pad_token(self) -> Self:
        _require(
            self.pad_token_id is None or self.pad_token_id < self.vocab_size,
            "pad_token_id is outside the vocabulary",
            got=self.pad_token_id,
            expected=f"less than vocab_size = {self.vocab_size}",
        )
        return self


def _readable_by_all(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without keys and values that some transformers release misreads or refuses."""
    kept = {
        key: copy.deepcopy(value)
        for key, value in raw.items()
        if key not in _NOT_WRITTEN and (value is not None or key in _MAY_BE_NULL)
    }
    return kept | {key: float(kept[key]) for key in _FLOATS if key in kept}


def _require(condition: bool, what: str, *, got: object, expected: object) -> None:
    if not condition:
        raise ConfigError(
            what, got=got, expected=expected, remedy="use the model's own config.json"
        )


def _as_config_error(error: ValidationError) -> ConfigError:
    """The first finding of pydantic, told as what, got, expected, remedy."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    return ConfigError(
        f"{'.'.join(map(str, first['loc']))} is not valid",
        got=f"{first['input']!r} ({type(first['input']).__name__})",
        expected=first["msg"],
        remedy="use the model's own config.json",
    )
