"""A run: what to train, on which data, for how long, read from a strict TOML file."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from glm5.errors import ConfigError
from glm5.lora.patterns import broken_patterns
from glm5.runtime.failures import DEFAULT_TIMEOUT_MINUTES
from glm5.train.overrides import flatten, merge_tables, parse_override
from glm5.train.run_errors import describe_errors
from glm5.train.template import RESERVED_ARGS

AttentionTarget = Literal["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
MlpTarget = Literal["gate_proj", "up_proj", "down_proj"]
IndexerTarget = Literal["wq_b", "wk", "weights_proj"]
LoraTarget = Literal[AttentionTarget, MlpTarget, IndexerTarget]

ATTENTION_TARGETS: tuple[AttentionTarget, ...] = get_args(AttentionTarget)
MLP_TARGETS: tuple[MlpTarget, ...] = get_args(MlpTarget)
INDEXER_TARGETS: tuple[IndexerTarget, ...] = get_args(IndexerTarget)

DEFAULT_INDEXER_LOSS_COEFF = 0.001

# These may change when a run resumes; every other field must stay as it was.
FREE_ON_RESUME = (
    "layout.tp",
    "layout.pp",
    "layout.vpp",
    "layout.cp",
    "layout.ep",
    "layout.etp",
    "layout.attention_parallel",
    "layout.layers_per_stage",
    "train.steps",
    "train.eval_every",
    "train.save_every",
    "train.keep",
    "train.log_every",
    "train.timeout_minutes",
    "train.resume",
    "output.dir",
    "output.tensorboard",
)


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


class _Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )


class ModelSection(_Section):
    """`[model]`: which checkpoint, and how it is computed."""

    path: Annotated[str, Field(min_length=1)]
    """Hugging Face folder, or a repo id `owner/name`."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights and the activations."""
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


class DataSection(_Section):
    """`[data]`: chats, and how they are cut into rows."""

    train: Paths
    """Training files (.jsonl or .parquet), one or a list."""
    eval: Paths | None = None
    """Evaluation files; absent: no evaluation."""
    seq_length: Annotated[int, Field(ge=2)]
    """Capacity of one packed row [tokens]."""
    shuffle: bool = True
    """Whether chats are shuffled before packing and rows in every epoch."""
    max_samples: Annotated[int, Field(ge=1)] | None = None
    """At most so many training chats are read [chats]; absent: all."""
    too_long: Literal["error", "truncate", "skip"] = "error"
    """What happens to a chat of more than seq_length tokens; cuts and skips are counted."""
    chat_template_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables handed to the chat template, such as clear_thinking = false."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        taken = [name for name in self.chat_template_args if name in RESERVED_ARGS]
        if taken:
            raise ValueError(
                f"chat_template_args has {', '.join(taken)}, which transformers takes for itself; "
                "expected names that the chat template reads"
            )
        return self


class LoraSection(_Section):
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


class LayoutSection(_Section):
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


class OptimizerSection(_Section):
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
    """Linear warm-up [steps]."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr {self.min_lr} is above lr {self.lr}")
        if self.schedule == "constant" and self.min_lr > 0:
            raise ValueError("min_lr does nothing with schedule constant; remove it")
        return self


class TrainSection(_Section):
    """`[train]`: how long, how much at a time, and what is kept."""

    steps: Annotated[int, Field(ge=1, lt=10**8)]
    """Optimizer steps in all, of up to eight digits; the schedule ends here [steps]."""
    global_batch_size: Annotated[int, Field(ge=1)]
    """Packed rows per optimizer step, over all ranks [rows]."""
    micro_batch_size: Annotated[int, Field(ge=1)] = 1
    """Packed rows per forward pass of one rank [rows]."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of the data order, the packing and the adapters' start."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Evaluation after every so many steps; 0: after the last step only [steps]."""
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
    """Weight of the indexer's loss; read RunConfig.indexer_loss_coeff, which fills the default."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size}"
            )
        return self


class OutputSection(_Section):
    """`[output]`: where the run writes."""

    dir: OnePath
    """Folder of checkpoints and metrics; made when missing."""
    tensorboard: bool = False
    """Whether TensorBoard event files are written beside metrics.jsonl."""


class RunConfig(_Section):
    """One training run; see the sections for the fields and their units."""

    model: ModelSection
    data: DataSection
    lora: LoraSection | None = None
    layout: LayoutSection = LayoutSection()
    optimizer: OptimizerSection
    train: TrainSection
    output: OutputSection

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [*self._schedule_problems(), *self._indexer_problems()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _schedule_problems(self) -> list[str]:
        problems = []
        if self.optimizer.warmup_steps >= self.train.steps:
            problems.append(
                f"optimizer.warmup_steps {self.optimizer.warmup_steps} is not below "
                f"train.steps {self.train.steps}"
            )
        if self.train.eval_every > 0 and self.data.eval is None:
            problems.append(f"train.eval_every {self.train.eval_every} needs data.eval")
        return problems

    def _indexer_problems(self) -> list[str]:
        coeff = self.train.indexer_loss_coeff
        if coeff and not self.trains_indexer:
            return [
                f"train.indexer_loss_coeff {coeff} needs a trained indexer: "
                f"add lora.targets {', '.join(INDEXER_TARGETS)}, or remove it"
            ]
        if coeff == 0 and self.lora is not None and self.trains_indexer:
            # Top-k has no gradient, so this loss is all that an indexer adapter learns from.
            return [
                "train.indexer_loss_coeff 0 leaves the indexer's adapters untrained: "
                "make it positive, or drop the indexer from lora.targets"
            ]
        return []

    @property
    def trains_indexer(self) -> bool:
        """Whether any weight of the indexer trains: full training, or an indexer LoRA target."""
        return self.lora is None or not set(INDEXER_TARGETS).isdisjoint(self.lora.targets)

    @property
    def indexer_loss_coeff(self) -> float:
        """Weight of the indexer's loss: as given, else 0.001 if the indexer trains, else 0."""
        given = self.train.indexer_loss_coeff
        if given is not None:
            return given
        return DEFAULT_INDEXER_LOSS_COEFF if self.trains_indexer else 0.0

    @classmethod
    def from_toml(cls, path: Path | str, overrides: Sequence[str] = ()) -> "RunConfig":
        """Read a run file and lay `key=value` overrides over it.

        Relative paths of the file start at the file's folder, those of overrides at the
        current folder.

        Raises:
            ConfigError: file missing or not TOML, an unknown key (with the nearest known
                name), or any wrong value; all problems are listed, each with its dotted name.
        """
        path = Path(path)
        tables = _resolve_paths(_read_toml(path), path.absolute().parent)
        given = [_resolve_paths(parse_override(text), Path.cwd()) for text in overrides]
        overridden = {name for table in given for name, _ in flatten(table)}
        return cls.from_dict(
            reduce(merge_tables, given, tables), source=str(path), overridden=overridden
        )

    @classmethod
    def from_dict(
        cls, tables: Mapping[str, Any], *, source: str, overridden: set[str] | None = None
    ) -> "RunConfig":
        """Build a run from nested tables, such as `to_toml_dict()` recorded in a checkpoint.

        Raises:
            ConfigError: as `from_toml`; `source` is the name that the message gives.
        """
        try:
            return cls.model_validate(tables)
        except ValidationError as error:
            raise describe_errors(error, cls, source, overridden or set()) from None

    def to_toml_dict(self) -> dict[str, Any]:
        """Return nested tables of plain JSON and TOML types, defaults filled in, for recording."""
        tables = self.model_dump(mode="json", exclude_none=True)
        tables["train"]["indexer_loss_coeff"] = self.indexer_loss_coeff
        return tables

    def differences(self, other: "RunConfig") -> list[str]:
        """Return the sorted dotted names that differ among those that must not on resume."""
        mine, theirs = dict(flatten(self.to_toml_dict())), dict(flatten(other.to_toml_dict()))
        names = (mine.keys() | theirs.keys()) - set(FREE_ON_RESUME)
        absent = object()
        return sorted(n for n in names if mine.get(n, absent) != theirs.get(n, absent))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the run file", got=error.strerror) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8", got=f"byte offset {error.start}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML", got=error) from None


def _absolute(value: str, folder: Path) -> str:
    try:
        return str((folder / Path(value).expanduser()).resolve())
    except (ValueError, RuntimeError) as error:  # a null character; a ~user that nobody is
        raise ConfigError("no path can be made of this", got=f"{value!r}: {error}") from None


def _resolve_paths(tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(item) for item in value]
        # An empty string is a mistake, not a name for the folder itself.
        if not isinstance(value, str) or not value:
            return value
        return _absolute(value, folder)

    def resolve_model(value: Any) -> Any:
        # A name such as zai-org/GLM-5 is a folder only where that folder exists.
        is_repo_id = isinstance(value, str) and value.count("/") <= 1 and value[:1] not in "./~"
        return value if is_repo_id and not (folder / value).is_dir() else resolve(value)

    resolvers = {
        ("model", "path"): resolve_model,
        ("data", "train"): resolve,
        ("data", "eval"): resolve,
        ("lora", "init_from"): resolve,
        ("output", "dir"): resolve,
    }
    resolved = dict(tables)
    for (section, key), resolver in resolvers.items():
        table = resolved.get(section)
        if isinstance(table, Mapping) and key in table:
            resolved[section] = {**table, key: resolver(table[key])}
    return resolved
