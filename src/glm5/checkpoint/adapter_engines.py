"""What SGLang and vLLM can serve of an adapter, whatever its layout."""

from collections.abc import Iterable
from typing import Literal

from glm5.checkpoint.names import summarise
from glm5.errors import AdapterError

Engine = Literal["sglang", "vllm"]
Consumer = Literal["peft", "sglang", "vllm"]

# What one server of vLLM may be told as --max-lora-rank; an adapter may have any rank below.
VLLM_MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

# Linears that the engine loads into one buffer each: it wants both of a pair, or all of three.
PARTNERS = {
    "q_a_proj": "kv_a_proj_with_mqa",
    "kv_a_proj_with_mqa": "q_a_proj",
    "gate_proj": "up_proj",
    "up_proj": "gate_proj",
}

_UNREAD_BY_BOTH = (
    "alpha_pattern",
    "exclude_modules",
    "layers_to_transform",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
)
# Settings that an engine leaves unread, so that it would serve another adapter than they describe.
UNREAD: dict[Engine, tuple[str, ...]] = {
    # alpha / r whatever use_rslora says; vllm takes alpha / sqrt(r) by it
    "sglang": (*_UNREAD_BY_BOTH, "use_rslora"),
    "vllm": _UNREAD_BY_BOTH,
}

_FUSED_AWAY = "it fuses wk and weights_proj into one linear and maps no adapter onto it"
_UNSERVED = {
    "sglang": {},
    "vllm": {
        "kv_b_proj": "its absorbed decode reads the base weight alone, so that prompts are adapted "
        "and generated tokens are not",
        "wk": _FUSED_AWAY,
        "weights_proj": _FUSED_AWAY,
    },
}


def check_servable(paths: Iterable[str], engine: Engine) -> None:
    """Raise AdapterError where the engine would drop or reject factors of a linear (its name
    decides).
    """
    unserved = _UNSERVED[engine]
    found = [path for path in paths if path.rpartition(".")[2] in unserved]
    if found:
        names = sorted({path.rpartition(".")[2] for path in found})
        raise AdapterError(
            f"{engine} does not serve adapters of {', '.join(names)}: {unserved[names[0]]}",
            got=summarise(found),
            remedy="serve it with sglang or merged (`glm5 export --as merged`), train without "
            "them, or leave them out on purpose "
            f"({' '.join(f'--without {name}' for name in names)}), which is another model",
        )


def check_rank(rank: int, engine: Engine) -> None:
    """Raise AdapterError for a rank that no server of the engine can be started for."""
    if engine == "vllm" and rank > VLLM_MAX_RANKS[-1]:
        raise AdapterError(
            "vllm serves no adapter of this rank",
            got=rank,
            expected=f"at most {VLLM_MAX_RANKS[-1]}",
            remedy="serve it with sglang or merged, or train a smaller rank",
        )


def max_lora_rank(rank: int, engine: Engine) -> int:
    """The least --max-lora-rank of a server that takes an adapter of this rank."""
    if engine == "sglang":
        return rank
    return next((size for size in VLLM_MAX_RANKS if size >= rank), VLLM_MAX_RANKS[-1])
