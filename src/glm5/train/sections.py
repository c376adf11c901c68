"""The sections of a run file that every kind of run shares."""

from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from glm5.lora.patterns import broken_patterns
from glm5.runtime.failures import DEFAULT_TIMEOUT_MINUTES

AttentionTarget = Literal["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
MlpTarget = Literal["gate_proj", "up_proj", "down_proj"]
IndexerTarget = Literal["wq_b", "wk", "weights_proj"]
LoraTarget = Literal[AttentionTarget, MlpTarget, IndexerTarget]

ATTENTION_TARGETS: tuple[AttentionTarget, ...] = get_args(AttentionTarget)
MLP_TARGETS: tuple[MlpTarget, ...] = get_args(MlpTarget)
INDEXER_TARGETS: tuple[IndexerTarget, ...] = get_args(IndexerTarget)


def _one_or_many(value: object) -> object:
    # TOML has strings and lists only; anything else is left for pydantic to refuse.
    items = [value] if isinstance(value, str) else value
    return tuple(_to_path(item) for item in items) if isinstance(items, list) else items


def _to_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _to_endings(value: object) -> object:
    items = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, str) and item for item in items):
        raise ValueError(f"got {value!r}, expected a list of names or one regular expression")
    return _to_tuple(value)


def _to_path(value: object) -> object:
    # Path("") would be the current folder; an empty string stays one and is refused.
    return Path(value) if isinstance(value, str) and value else value


Paths = Annotated[tuple[Path, ...], BeforeValidator(_one_or_many), Field(min_length=1)]
OnePath = Annotated[Path, BeforeValidator(_to_path)]
# No linear is wider: a larger number is a slip, and would not fit into memory.
Rank = Annotated[int, Field(ge=1, le=65536)]
LoraTargets = Annotated[tuple[LoraTarget, ...], BeforeValidator(_to_tuple), Field(min_length=1)]

Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], BeforeValidator(_to_tuple)]
Endings = Annotated[tuple[str, ...] | str, BeforeValidator(_to_endings)]

LayersPerStage = Annotated[
    tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(_to_tuple), Field(min_length=1)
]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class ModelSection(Section):
    """`[model]`: which checkpoint, and how it is computed."""

    path: Annotated[str, Field(min_length=1)]
    """Hugging Face folder, or a repo id `owner/name`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights and the activations."""
    base_weights: Literal["dtype", "fp8"] = "dtype"
    """fp8: linears that an FP8 release quantises stay in float8, or are quantised when they are
    read, and `[lora]` trains on them; dtype: all weights are of that type."""
    fp8_compute: bool = False
    """Whether float8 weights are multiplied in float8, with the activations quantised too: faster,
    less exact."""
    fp8_transient_mib: Annotated[int, Field(ge=1)] | None = None
    """How much of a float8 kv_b_proj is dequantised at a time [MiB]; absent: 64."""
    attention_backend: Annotated[str, Field(min_length=1)] | None = None
    """Name of the attention backend; absent: the default of the device."""
    deterministic_attention: bool = False
    """Whether the attention's gradients have the same bits every time; slower on a GPU."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Which activations are computed again in the backward pass instead of kept."""
    latent_norm_eps: Annotated[float, Field(gt=0)] | None = None
    """Epsilon of the q and kv latent norms; absent: the checkpoint's."""
    mtp: bool = False
    """Whether the multi-token-prediction head is built; its loss trains it and the model, and with
    `[lora]` the adapters of the model alone."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        unused = {
            "fp8_compute": self.fp8_compute,
            "fp8_transient_mib": self.fp8_transient_mib is not None,
        }
        given = [name for name, is_given in unused.items() if is_given]
        if given and self.base_weights != "fp8":
            raise ValueError(
                f"{' and '.join(given)} without base_weights 'fp8' changes nothing: "
                "set base_weights to 'fp8', or remove it"
            )
        return self


class LoraSection(Section):
    """`[lora]`: train adapters only; without this table every weight trains."""

    rank: Rank = 16
    """Inner width r of the adapter: delta W = (alpha / r) B A."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the adapter: delta W = (alpha / r) B A."""
    targets: LoraTargets = ATTENTION_TARGETS + MLP_TARGETS
    """Hugging Face names of the linears that get an adapter."""
    expert_lora: Literal["per_expert", "shared_outer", "none"] = "per_expert"
    """Adapters of routed experts: a pair for each; one A for all of gate and up and one B for all
    of down, the other factor for each; or none."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that an element of an adapter's input is dropped in training."""
    use_rslora: bool = False
    """Whether the scale is alpha / sqrt(r) instead of alpha / r."""
    rank_pattern: dict[str, Rank] = Field(default_factory=dict)
    """Other ranks: PEFT's patterns on the Hugging Face paths of linears."""
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Other alphas, likewise."""
    exclude: Endings = ()
    """Linears that get none: endings of their paths, or one regular expression for whole paths."""
    train: Names = ()
    """Whole parameters that train beside the adapter: router, norms, embeddings, lm_head, or
    regular expressions for the Hugging Face names of such."""
    init_from: OnePath | None = None
    """Folder of an adapter (PEFT's, or an engine's) whose values a new run starts from; absent: B
    is zero, so that the first step sees the base model."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [*self._repeated(), *self._without_effect()]
        whole = self.exclude if isinstance(self.exclude, str) else None
        problems += broken_patterns([*self.rank_pattern, *self.alpha_pattern, *self.train], whole)
        if self.dropout and "kv_b_proj" in self.targets:
            problems.append(
                f"dropout {self.dropout} cannot be computed for kv_b_proj: "
                "give targets without it, or set dropout to 0"
            )
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _repeated(self) -> list[str]:
        return [
            f"{name} names {', '.join(twice)} more than once"
            for name, values in (("targets", self.targets), ("train", self.train))
            if (twice := sorted({value for value in values if values.count(value) > 1}))
        ]

    def _without_effect(self) -> list[str]:
        if self.expert_lora == "per_expert" or not set(MLP_TARGETS).isdisjoint(self.targets):
            return []
        return [
            f"expert_lora {self.expert_lora} does nothing: "
            f"targets has none of {', '.join(MLP_TARGETS)}"
        ]


class LayoutSection(Section):
    """`[layout]`: how the model is split over processes; data parallelism takes what remains."""

    tp: Annotated[int, Field(ge=1)] = 1
    """Tensor parallel ranks, with sequence parallelism: they share heads and widths."""
    pp: Annotated[int, Field(ge=1)] = 1
    """Pipeline parallel ranks: they share the layers."""
    vpp: Annotated[int, Field(ge=1)] = 1
    """Pipeline stages of every rank, interleaved: less idle time for more messages."""
    cp: Annotated[int, Field(ge=1)] = 1
    """Context parallel ranks: they share the tokens of a row."""
    ep: Annotated[int, Field(ge=1)] = 1
    """Expert parallel ranks: they share the routed experts."""
    etp: Annotated[int, Field(ge=1)] = 1
    """Expert tensor parallel ranks: they share the width of every routed expert."""
    attention_parallel: Literal["tokens", "heads"] = "tokens"
    """What tensor parallel ranks share in the attention core and the indexer."""
    layers_per_stage: LayersPerStage | None = None
    """Decoder layers of each of the pp * vpp pipeline stages, in the model's order; absent: the
    most even split that IndexShare allows."""

    @property
    def splits_model(self) -> bool:
        """Whether one process holds less than the whole model."""
        return max(self.tp, self.pp, self.ep, self.etp) > 1


class OptimizerSection(Section):
    """`[optimizer]`: AdamW and its learning-rate schedule."""

    lr: Annotated[float, Field(gt=0)]
    """Highest learning rate, reached after the warm-up."""
    min_lr: Annotated[float, Field(ge=0)] = 0.0
    """Learning rate at which a cosine or linear schedule ends, after the last step."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    clip_grad: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0: no clipping."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Linear warm-up [optimizer steps]."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}")
        if self.schedule == "constant" and self.min_lr > 0:
            raise ValueError("min_lr does nothing with schedule constant; remove it")
        return self


class LengthSection(Section):
    """`[train]` of any run: how long, and what is kept."""

    steps: Annotated[int, Field(ge=1, lt=10**8)]
    """Steps in all, of up to eight digits; the schedule ends here [steps]."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the data order, of everything that is drawn, and of the adapters' start."""
    save_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoint after every so many steps; 0: after the last step only [steps]."""
    keep: Annotated[int, Field(ge=1)] = 2
    """How many of the newest checkpoints stay on disk [checkpoints]."""
    log_every: Annotated[int, Field(ge=1)] = 1
    """One line of metrics per so many steps [steps]."""
    resume: Literal["auto", "never", "must"] = "auto"
    """auto: go on from output.dir's checkpoint where there is one; never: start anew; must."""
    timeout_minutes: Annotated[float, Field(gt=0, le=10**5)] = DEFAULT_TIMEOUT_MINUTES
    """How long a process waits for the others, as in a save, before it gives up [minutes]."""
    indexer_loss_coeff: Annotated[float, Field(ge=0)] | None = None
    """Weight of the indexer's loss; absent: the default of the kind of run."""


class OutputSection(Section):
    """`[output]`: where the run writes."""

    dir: OnePath
    """Folder of checkpoints and metrics; made when missing."""
    tensorboard: bool = False
    """Whether TensorBoard event files are written beside metrics.jsonl."""
