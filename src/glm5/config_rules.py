"""How a raw glm_moe_dsa config.json is read where one meaning has several spellings.

Every function takes the raw dict, treats null like an absent key, and raises ConfigError where the
file contradicts itself or asks for a model that this package does not compute.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from glm5.errors import ConfigError

Raw = Mapping[str, Any]
IndexerType = Literal["full", "shared"]
MlpLayerType = Literal["dense", "sparse"]

MODEL_TYPE = "glm_moe_dsa"

# The values that transformers takes when the key is absent.
DEFAULT_TOPK_FREQ = 1
DEFAULT_SKIP_TOPK_OFFSET = 2
DEFAULT_FIRST_K_DENSE = 3

# Settings that select another computation than the one implemented here.
_ONLY_VALUES: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
}

# The schedule is listed layer by layer, so an absurd count must not reach it.
_MAX_LAYERS = 10_000

_PATTERN_LETTERS: dict[str, IndexerType] = {"F": "full", "S": "shared"}
_ROPE_KEYS = ("rope_parameters", "rope_scaling")


def check_model_type(raw: Raw) -> None:
    """Raise ConfigError unless the file describes the glm_moe_dsa family."""
    model_type = raw.get("model_type")
    if model_type == MODEL_TYPE:
        return
    if model_type == "glm5_next":
        raise ConfigError(
            "GLM-5.3-Flash is another architecture and is not supported",
            got="model_type 'glm5_next' (linear attention, NoPE layers, vision)",
            expected=f"model_type {MODEL_TYPE!r} (GLM-5, 5.1, 5.2, 5.3)",
            remedy="use GLM-5.3 itself, whose architecture is GLM-5.2's",
        )
    raise ConfigError(
        "this model is not of the GLM-5 family",
        got=f"model_type {model_type!r}",
        expected=f"model_type {MODEL_TYPE!r}",
        remedy="name a GLM-5, 5.1, 5.2 or 5.3 checkpoint",
    )


def check_supported_values(raw: Raw) -> None:
    """Raise ConfigError for a setting under which the model computes something else."""
    for key, only in _ONLY_VALUES.items():
        value = raw.get(key)
        if value is None:
            continue
        # bool is an int in Python: 1 must not pass for True, nor 0 for False.
        if value != only or isinstance(value, bool) != isinstance(only, bool):
            raise ConfigError(
                f"unsupported {key}",
                got=repr(value),
                expected=repr(only),
                remedy="no GLM-5 release sets this; use the model's own config.json",
            )


def check_derived_values(raw: Raw) -> None:
    """Raise ConfigError where a redundant key disagrees with the keys that it follows from."""
    qk_head_dim = require_int(raw, "qk_nope_head_dim") + require_int(raw, "qk_rope_head_dim")
    derived = {
        "qk_head_dim": (qk_head_dim, "qk_nope_head_dim + qk_rope_head_dim"),
        "num_key_value_heads": (require_int(raw, "num_attention_heads"), "num_attention_heads"),
    }
    for key, (value, source) in derived.items():
        if raw.get(key) is not None and raw[key] != value:
            raise ConfigError(
                f"{key} contradicts {source}",
                got=repr(raw[key]),
                expected=repr(value),
                remedy=f"remove {key}, or correct the keys it follows from",
            )


def require_int(
    raw: Raw, key: str, *, default: int | None = None, minimum: int = 1, maximum: int = 2**31 - 1
) -> int:
    """`raw[key]` as an int from `minimum` to `maximum`; `default` when the key is absent."""
    value = raw.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ConfigError(
            f"{key} is missing" if value is None else f"{key} is not valid",
            got=repr(value),
            expected=f"an integer from {minimum} to {maximum}",
            remedy="use the model's own config.json",
        )
    return value


def read_n_routed_experts(raw: Raw) -> int:
    """The number of routed experts: `n_routed_experts`, else `num_experts`.

    Some transformers releases write `"num_experts": 256` beside any `n_routed_experts`, so the
    latter wins without a check.
    """
    only_older = raw.get("n_routed_experts") is None and raw.get("num_experts") is not None
    return require_int(raw, "num_experts" if only_older else "n_routed_experts")


def read_rope_theta(raw: Raw) -> Any:
    """The one base of the rotary embedding, flat or inside `rope_parameters`.

    There is no default: transformers would take 10000 in silence, and no GLM-5 model uses that.
    """
    found = {} if raw.get("rope_theta") is None else {"rope_theta": raw["rope_theta"]}
    for key in _ROPE_KEYS:
        parameters = raw.get(key)
        if parameters is None:
            continue
        _check_plain_rope(key, parameters)
        if parameters.get("rope_theta") is not None:
            found[f"{key}.rope_theta"] = parameters["rope_theta"]
    if not found:
        raise ConfigError(
            "rope_theta is missing",
            expected="rope_theta, flat or inside rope_parameters",
            remedy="add it: 1000000 for GLM-5 and 5.1, 8000000 for GLM-5.2 and 5.3",
        )
    thetas = list(found.values())
    if any(theta != thetas[0] for theta in thetas):
        raise ConfigError(
            "rope_theta is given twice with different values",
            got=", ".join(f"{key} = {value!r}" for key, value in found.items()),
            expected="one value",
            remedy="keep the value that the model was trained with",
        )
    return thetas[0]


def _check_plain_rope(key: str, parameters: Any) -> None:
    """GLM-5 rotates all of `qk_rope_head_dim` with unscaled frequencies."""
    if not isinstance(parameters, dict):
        raise ConfigError(f"{key} is not valid", got=repr(parameters), expected="an object")
    # "type" is the older spelling, which transformers still accepts.
    kinds = (parameters.get("rope_type"), parameters.get("type"))
    fraction = parameters.get("partial_rotary_factor")
    if any(kind not in (None, "default") for kind in kinds) or fraction not in (None, 1.0):
        raise ConfigError(
            f"unsupported {key}",
            got=repr(parameters),
            expected="rope_type 'default' over the whole of qk_rope_head_dim",
            remedy="GLM-5 models are trained without rope scaling: use their own config.json",
        )


def read_dtype(raw: Raw) -> Any:
    """The dtype name under `dtype`, or under its older spelling `torch_dtype`."""
    dtype, older = raw.get("dtype"), raw.get("torch_dtype")
    if dtype is not None and older is not None and dtype != older:
        raise ConfigError(
            "dtype and torch_dtype differ",
            got=f"dtype {dtype!r}, torch_dtype {older!r}",
            expected="one value",
            remedy="remove torch_dtype",
        )
    return dtype if dtype is not None else older


def read_eos_token_id(raw: Raw) -> Any:
    """The end-of-text token ids as a tuple: a bare id is one of them, null is none."""
    eos = raw.get("eos_token_id")
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (eos,)


def read_fp8(raw: Raw) -> dict[str, Any] | None:
    """The fields of Fp8Quantization, or None for a checkpoint without `quantization_config`."""
    quantization = raw.get("quantization_config")
    if quantization is None:
        return None
    is_fp8 = (
        isinstance(quantization, dict)
        and quantization.get("quant_method") == "fp8"
        and quantization.get("fmt") in (None, "e4m3")
        and isinstance(quantization.get("weight_block_size"), list)
    )
    if not is_fp8:
        raise ConfigError(
            "unsupported quantization_config",
            got=_without_modules(quantization),
            expected="quant_method 'fp8', fmt 'e4m3', and weight_block_size [rows, columns]",
            remedy="use the BF16 release or the release named FP8",
        )
    kept = quantization.get("modules_to_not_convert")
    return {
        "weight_block_size": tuple(quantization["weight_block_size"]),
        "modules_to_not_convert": tuple(kept) if isinstance(kept, list) else kept or (),
    }


def _without_modules(quantization: Any) -> str:
    """A quantization_config without its list of modules, which has hundreds of names."""
    if isinstance(quantization, dict):
        quantization = dict(quantization)
        quantization.pop("modules_to_not_convert", None)
    return repr(quantization)


def expand_indexer_types(raw: Raw) -> tuple[IndexerType, ...]:
    """One kind per decoder layer: `indexer_types`, else `index_topk_pattern`, else the frequency.

    With freq = `index_topk_freq` and offset = `index_skip_topk_offset`, layer i is full iff
    max(i - offset + 1, 0) % freq == 0 (transformers' GlmMoeDsaConfig). Raises ConfigError on a
    wrong length or name, a first layer that is shared, and spellings that disagree.
    """
    num_layers = require_int(raw, "num_hidden_layers", maximum=_MAX_LAYERS)
    types = _listed_indexer_types(raw, num_layers)
    if types is None:
        types = types_from_frequency(num_layers, *_read_frequency(raw))
    elif not _frequency_agrees(raw, types):
        freq, offset = raw["index_topk_freq"], raw.get("index_skip_topk_offset")
        raise ConfigError(
            "the listed indexer types contradict index_topk_freq",
            got=f"index_topk_freq {freq}, index_skip_topk_offset {offset}, list {spell(types)}",
            expected="a list that the frequency and offset give, or the list alone",
            remedy="remove index_topk_freq and index_skip_topk_offset if the list is right",
        )
    if types[0] != "full":
        raise ConfigError(
            "the first layer is shared, but no layer before it has selected keys",
            got=spell(types),
            expected="a schedule that starts with a full layer (F)",
            remedy="use the model's own indexer_types",
        )
    return types


def types_from_frequency(num_layers: int, freq: int, offset: int) -> tuple[IndexerType, ...]:
    """Layer i is full iff max(i - offset + 1, 0) % freq == 0."""
    return tuple(
        "full" if max(i - offset + 1, 0) % freq == 0 else "shared" for i in range(num_layers)
    )


def _listed_indexer_types(raw: Raw, num_layers: int) -> tuple[IndexerType, ...] | None:
    listed: dict[str, tuple[IndexerType, ...]] = {}
    if raw.get("indexer_types") is not None:
        listed["indexer_types"] = _layer_list(
            "indexer_types", raw["indexer_types"], num_layers, ("full", "shared")
        )
    if (pattern := raw.get("index_topk_pattern")) is not None:
        # An unknown letter stays as it is, so that the check of names reports it.
        words = (
            [_PATTERN_LETTERS.get(c, c) for c in pattern] if isinstance(pattern, str) else pattern
        )
        listed["index_topk_pattern"] = _layer_list(
            "index_topk_pattern", words, num_layers, ("full", "shared")
        )
    if len(set(listed.values())) > 1:
        raise ConfigError(
            "indexer_types contradicts index_topk_pattern",
            got=", ".join(f"{key} {spell(types)}" for key, types in listed.items()),
            expected="the same schedule in both",
            remedy="keep the one that the checkpoint's tensors agree with",
        )
    return next(iter(listed.values()), None)


def _read_frequency(raw: Raw) -> tuple[int, int]:
    freq = require_int(raw, "index_topk_freq", default=DEFAULT_TOPK_FREQ)
    offset = require_int(raw, "index_skip_topk_offset", default=DEFAULT_SKIP_TOPK_OFFSET, minimum=0)
    return freq, offset


def _frequency_agrees(raw: Raw, types: tuple[IndexerType, ...]) -> bool:
    """Whether the list fits the frequency in the file; without an offset, whether any would do.

    Some transformers releases drop `index_topk_freq` and keep the offset: alone it says nothing.
    """
    freq, given = _read_frequency(raw)
    if raw.get("index_topk_freq") is None:
        return True
    num_layers = len(types)
    offsets = range(1, num_layers + 1) if raw.get("index_skip_topk_offset") is None else [given]
    return any(types_from_frequency(num_layers, freq, offset) == types for offset in offsets)


def expand_mlp_layer_types(raw: Raw) -> tuple[MlpLayerType, ...]:
    """One kind per decoder layer: `mlp_layer_types`, else `first_k_dense_replace` dense layers.

    transformers writes its default `first_k_dense_replace` beside any list, so that value never
    contradicts one; another value that disagrees with the list raises ConfigError.
    """
    num_layers = require_int(raw, "num_hidden_layers", maximum=_MAX_LAYERS)
    first_k = require_int(raw, "first_k_dense_replace", default=DEFAULT_FIRST_K_DENSE, minimum=0)
    derived: tuple[MlpLayerType, ...] = tuple(
        "dense" if layer < first_k else "sparse" for layer in range(num_layers)
    )
    if raw.get("mlp_layer_types") is None:
        return derived
    types: tuple[MlpLayerType, ...] = _layer_list(
        "mlp_layer_types", raw["mlp_layer_types"], num_layers, ("dense", "sparse")
    )
    if types != derived and first_k != DEFAULT_FIRST_K_DENSE:
        raise ConfigError(
            "mlp_layer_types contradicts first_k_dense_replace",
            got=f"first_k_dense_replace {first_k}, mlp_layer_types {spell(types)}",
            expected=f"mlp_layer_types {spell(derived)}, or the list alone",
            remedy="remove first_k_dense_replace if the list is right",
        )
    return types


def _layer_list(key: str, value: Any, num_layers: int, names: Sequence[Any]) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise ConfigError(
            f"{key} is not valid", got=repr(value), expected=f"a list of {' or '.join(names)}"
        )
    for layer, name in enumerate(value):
        if name not in names:
            raise ConfigError(
                f"unknown layer kind in {key}",
                got=f"{name!r} at layer {layer}",
                expected=" or ".join(map(repr, names)),
                remedy="use the model's own config.json",
            )
    if len(value) != num_layers:
        raise ConfigError(
            f"{key} has the wrong length",
            got=f"{len(value)} layers",
            expected=f"num_hidden_layers = {num_layers}",
            remedy="list the decoder layers only, without the MTP layers",
        )
    return tuple(value)


def spell(types: Sequence[str]) -> str:
    """A layer schedule as one letter per layer, such as FFFSSSF."""
    return "".join(name[0].upper() for name in types)
