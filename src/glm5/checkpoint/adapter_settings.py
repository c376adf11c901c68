"""adapter_config.json: which weights PEFT would adapt by it, and with what rank and alpha."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
)

from glm5.checkpoint.adapter_layout import fused_weight, peft_weight
from glm5.checkpoint.ckpt_dir import RECORD_FILE, STEPS_FOLDER
from glm5.errors import AdapterError
from glm5.lora.patterns import broken_patterns, by_pattern, matches

CONFIG_FILE = "adapter_config.json"

# With one of these the delta is more, or other, than (alpha / r) * b @ a.
_MUST_BE_OFF = (
    "alora_invocation_tokens",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
)


def _check_whole(pattern: str) -> str:
    if problems := broken_patterns((), pattern):
        raise ValueError(f"not a regular expression: {problems[0]}")
    return pattern


def _check_ending(pattern: str) -> str:
    if problems := broken_patterns([pattern]):
        raise ValueError(f"not a regular expression for endings: {problems[0]}")
    return pattern


WholePattern = Annotated[str, AfterValidator(_check_whole)]
EndingPattern = Annotated[str, AfterValidator(_check_ending)]
# Wider than any linear; more is a damaged number, and no memory would hold it.
MAX_RANK = 65536
Rank = Annotated[int, Field(ge=1, le=MAX_RANK)]
Names = frozenset[str]


class AdapterSettings(BaseModel):
    """The settings of a plain LoRA adapter, in PEFT's spelling; others are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    peft_type: Literal["LORA"]
    base_model_name_or_path: str | None = None
    r: Rank
    lora_alpha: FiniteFloat
    bias: Literal["none"] = "none"
    init_lora_weights: bool | Literal["gaussian", "orthogonal", "eva"] = True
    """The other initialisations of PEFT change the base weights."""
    target_modules: Names | WholePattern | None = None
    target_parameters: Names | None = None
    exclude_modules: Names | WholePattern | None = None
    layers_to_transform: tuple[int, ...] | int | None = None
    modules_to_save: tuple[str, ...] | None = None
    inference_mode: bool | None = None
    """Says nothing of the weights, but that PEFT wrote the file."""
    use_rslora: bool = False
    rank_pattern: dict[EndingPattern, Rank] | None = None
    alpha_pattern: dict[EndingPattern, FiniteFloat] | None = None

    @classmethod
    def read(cls, folder: Path) -> "AdapterSettings":
        """Read adapter_config.json; AdapterError when it is absent, damaged or not plain LoRA."""
        _check_is_adapter(folder)
        path = folder / CONFIG_FILE
        try:
            text = path.read_text(encoding="utf-8")
            settings = cls.model_validate_json(text)
        except (OSError, UnicodeDecodeError) as error:
            raise AdapterError(
                f"{path} cannot be read", got=error, remedy="give a folder that PEFT saved"
            ) from error
        except ValidationError as error:
            raise _refusal(path, error) from error
        _check_is_plain(path, json.loads(text))
        return settings

    def weights(self, linears: Iterable[str]) -> list[str]:
        """The weights that PEFT would adapt in a model of these linears, in the given order."""
        weights: dict[str, None] = {}
        for path in linears:
            if self._is_target_module(path):
                weights[path] = None
            holder = peft_weight(path)
            name = holder if fused_weight(holder) else f"{path}.weight"
            if matches(name, self.target_parameters):
                weights[name] = None
        return list(weights)

    def rank(self, weight: str) -> int:
        """The rank of a weight; a fused one has that of all its projections together."""
        return by_pattern(self.rank_pattern, weight, self.r)

    def scale(self, weight: str) -> float:
        """The scale of a weight: alpha / rank, or alpha / sqrt(rank) with use_rslora."""
        rank, alpha = self.rank(weight), by_pattern(self.alpha_pattern, weight, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def saves_module(self, name: str) -> bool:
        """Whether PEFT saves and loads the module that the tensor `name` belongs to."""
        # PEFT compares ends of names, not whole parts of them
        return name.rpartition(".")[0].endswith(self.modules_to_save or ())

    def _is_target_module(self, path: str) -> bool:
        layers = self.layers_to_transform
        if layers is not None and not isinstance(self.target_modules, str):
            layer = int(path.split(".")[2])
            if layer not in ((layers,) if isinstance(layers, int) else layers):
                return False
        return matches(path, self.target_modules) and not matches(path, self.exclude_modules)


def _check_is_adapter(folder: Path) -> None:
    if (folder / RECORD_FILE).is_file() or (folder / STEPS_FOLDER).is_dir():
        raise AdapterError(
            f"{folder} is a checkpoint of glm5, not an adapter folder",
            remedy="`glm5 export CKPT_DIR OUT_DIR --as adapter --for peft|sglang|vllm` writes its "
            "adapter at once",
        )


def _refusal(path: Path, error: ValidationError) -> AdapterError:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    # what lies at no place is the text itself: no JSON, or no object
    if not where or first["type"] == "missing":
        return AdapterError(
            f"{path} is damaged or incomplete",
            got=f"no {where}" if where else first["msg"],
            expected="a JSON object with peft_type, r and lora_alpha",
            remedy="copy or save the folder again",
        )
    return AdapterError(
        f"{path}: {where} is not supported",
        got=repr(first["input"])[:200],
        expected=first["msg"],
        remedy="merge this adapter with PEFT and use the merged model",
    )


def _check_is_plain(path: Path, raw: Mapping[str, Any]) -> None:
    for name in _MUST_BE_OFF:
        if raw.get(name):
            raise AdapterError(
                f"{path}: {name} is not supported",
                got=raw[name],
                expected="plain LoRA",
                remedy="merge this adapter with PEFT and use the merged model",
            )
