"""Reads a strict TOML run file of any kind, and compares it with the run that it resumes."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import ValidationError, model_validator

from glm5.errors import ConfigError
from glm5.train.overrides import flatten, merge_tables, parse_override
from glm5.train.run_errors import describe_errors
from glm5.train.sections import (
    INDEXER_TARGETS,
    LayoutSection,
    LengthSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    OutputSection,
    Section,
)

# These may change when a run of any kind resumes.
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
    "train.save_every",
    "train.keep",
    "train.log_every",
    "train.timeout_minutes",
    "train.resume",
    "output.dir",
    "output.tensorboard",
)

Resolver = Callable[[Any, Path], Any]
"""(value as written, folder where relative paths start) -> value."""

RunKind = Literal["supervised fine-tuning", "reinforcement learning"]


def _absolute(value: str, folder: Path) -> str:
    try:
        return str((folder / Path(value).expanduser()).resolve())
    except (ValueError, RuntimeError) as error:  # a null character; a ~user that nobody is
        raise ConfigError("no path can be made of this", got=f"{value!r}: {error}") from None


def resolve_path(value: Any, folder: Path) -> Any:
    """A path, or a list of them, from `folder`; what is neither is left for the check to refuse."""
    if isinstance(value, list):
        return [resolve_path(item, folder) for item in value]
    # An empty string is a mistake, not a name for the folder itself.
    if not isinstance(value, str) or not value:
        return value
    return _absolute(value, folder)


def resolve_model(value: Any, folder: Path) -> Any:
    """As a path, unless it is the name of a repository."""
    # A name such as zai-org/GLM-5 is a folder only where that folder exists.
    is_repo_id = isinstance(value, str) and value.count("/") <= 1 and value[:1] not in "./~"
    return value if is_repo_id and not (folder / value).is_dir() else resolve_path(value, folder)


class RunFile(Section):
    """What every kind of run has; see the sections for the fields and their units."""

    free_on_resume: ClassVar[tuple[str, ...]] = FREE_ON_RESUME
    """These may change when a run resumes; every other field must stay as it was."""
    resolvers: ClassVar[Mapping[tuple[str, str], Resolver]] = {
        ("model", "path"): resolve_model,
        ("lora", "init_from"): resolve_path,
        ("output", "dir"): resolve_path,
    }
    """(section, key) of what names a file, and how a relative name of it is resolved."""
    kind: ClassVar[RunKind]
    default_indexer_loss_coeff: ClassVar[float]
    """Where the indexer trains and the file does not say."""

    model: ModelSection
    lora: LoraSection | None = None
    layout: LayoutSection = LayoutSection()
    optimizer: OptimizerSection
    train: LengthSection
    output: OutputSection

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := self.problems():
            raise ValueError("; ".join(problems))
        return self

    def problems(self) -> list[str]:
        """What cannot be right though every section is."""
        return [
            *self._schedule_problems(),
            *self._indexer_problems(),
            *self._base_weights_problems(),
        ]

    @property
    def num_updates(self) -> int:
        """Optimizer updates of the whole run, over which the schedule goes."""
        return self.train.steps

    def _schedule_problems(self) -> list[str]:
        if self.optimizer.warmup_steps < self.num_updates:
            return []
        return [
            f"optimizer.warmup_steps {self.optimizer.warmup_steps} is not below {self.updates_told}"
        ]

    @property
    def updates_told(self) -> str:
        """Which settings say how many updates there are."""
        return f"train.steps {self.train.steps}"

    def _indexer_problems(self) -> list[str]:
        coeff = self.train.indexer_loss_coeff
        if coeff and not self.trains_indexer:
            return [
                f"train.indexer_loss_coeff {coeff} needs a trained indexer: "
                f"add lora.targets {', '.join(INDEXER_TARGETS)}, or remove it"
            ]
        if self.indexer_loss_coeff == 0 and self.lora is not None and self.trains_indexer:
            # Top-k has no gradient, so this loss is all that an indexer adapter learns from.
            return [
                "train.indexer_loss_coeff 0 leaves the indexer's adapters untrained: "
                "make it positive, or drop the indexer from lora.targets"
            ]
        return []

    def _base_weights_problems(self) -> list[str]:
        if self.model.base_weights == "dtype" or self.lora is not None:
            return []
        return [
            "model.base_weights 'fp8' never trains, and without [lora] every weight does: "
            "add [lora], or set model.base_weights to 'dtype'"
        ]

    @property
    def trains_indexer(self) -> bool:
        """Whether any weight of the indexer trains: full training, or an indexer LoRA target."""
        return self.lora is None or not set(INDEXER_TARGETS).isdisjoint(self.lora.targets)

    @property
    def indexer_loss_coeff(self) -> float:
        """Weight of the indexer's loss: as given, else 0 or, where it trains, the default."""
        given = self.train.indexer_loss_coeff
        if given is not None:
            return given
        return self.default_indexer_loss_coeff if self.trains_indexer else 0.0

    @classmethod
    def from_toml(cls, path: Path | str, overrides: Sequence[str] = ()) -> Self:
        """Read a run file and lay `key=value` overrides over it.

        Relative paths of the file start at the file's folder, those of overrides at the
        current folder.

        Raises:
            ConfigError: file missing or not TOML, an unknown key (with the nearest known
                name), or any wrong value; all problems are listed, each with its dotted name.
        """
        path = Path(path)
        tables = cls._resolve_paths(read_toml(path), path.absolute().parent)
        given = [cls._resolve_paths(parse_override(text), Path.cwd()) for text in overrides]
        overridden = {name for table in given for name, _ in flatten(table)}
        return cls.from_dict(
            reduce(merge_tables, given, tables), source=str(path), overridden=overridden
        )

    @classmethod
    def from_dict(
        cls, tables: Mapping[str, Any], *, source: str, overridden: set[str] | None = None
    ) -> Self:
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

    def differences(self, other: Self) -> list[str]:
        """Return the sorted dotted names that differ among those that must not on resume."""
        mine, theirs = dict(flatten(self.to_toml_dict())), dict(flatten(other.to_toml_dict()))
        names = (mine.keys() | theirs.keys()) - set(self.free_on_resume)
        absent = object()
        return sorted(n for n in names if mine.get(n, absent) != theirs.get(n, absent))

    @classmethod
    def _resolve_paths(cls, tables: Mapping[str, Any], folder: Path) -> dict[str, Any]:
        resolved = dict(tables)
        for (section, key), resolver in cls.resolvers.items():
            table = resolved.get(section)
            if isinstance(table, Mapping) and key in table:
                resolved[section] = {**table, key: resolver(table[key], folder)}
        return resolved


def kind_of(tables: Mapping[str, Any]) -> RunKind:
    """What kind of run a file describes: the table [rl] makes one of reinforcement learning."""
    return "reinforcement learning" if "rl" in tables else "supervised fine-tuning"


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a run file as they stand there.

    Raises:
        ConfigError: the file is missing or not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read the run file", got=error.strerror) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8", got=f"byte offset {error.start}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML", got=error) from None
