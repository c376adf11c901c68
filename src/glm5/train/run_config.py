"""A run of supervised fine-tuning: what to train, on which data, for how long."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, model_validator

from glm5.train.run_file import FREE_ON_RESUME, Resolver, RunFile, RunKind, resolve_path
from glm5.train.sections import LengthSection, Paths, Section
from glm5.train.template import RESERVED_ARGS

DEFAULT_INDEXER_LOSS_COEFF = 0.001


class DataSection(Section):
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


class TrainSection(LengthSection):
    """`[train]`: how long, how much at a time, and what is kept."""

    global_batch_size: Annotated[int, Field(ge=1)]
    """Packed rows per optimizer step, over all ranks [rows]."""
    micro_batch_size: Annotated[int, Field(ge=1)] = 1
    """Packed rows per forward pass of one rank [rows]."""
    eval_every: Annotated[int, Field(ge=0)] = 0
    """Evaluation after every so many steps; 0: after the last step only [steps]."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size}"
            )
        return self


class RunConfig(RunFile):
    """One run of supervised fine-tuning; see the sections for the fields and their units."""

    kind: ClassVar[RunKind] = "supervised fine-tuning"
    free_on_resume: ClassVar[tuple[str, ...]] = (*FREE_ON_RESUME, "train.eval_every")
    resolvers: ClassVar[Mapping[tuple[str, str], Resolver]] = {
        **RunFile.resolvers,
        ("data", "train"): resolve_path,
        ("data", "eval"): resolve_path,
    }
    default_indexer_loss_coeff: ClassVar[float] = DEFAULT_INDEXER_LOSS_COEFF

    data: DataSection
    train: TrainSection

    def problems(self) -> list[str]:
        """What cannot be right though every section is."""
        if self.train.eval_every > 0 and self.data.eval is None:
            return [
                *super().problems(),
                f"train.eval_every {self.train.eval_every} needs data.eval",
            ]
        return super().problems()
