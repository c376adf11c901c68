"""A run of reinforcement learning: a run file with a table `[rl]`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from glm5.rl.sections import (
    SERVERS,
    GapSection,
    PromptSection,
    RewardSection,
    RlSection,
    RolloutSection,
)
from glm5.train.run_config import RunConfig
from glm5.train.run_file import (
    FREE_ON_RESUME,
    Resolver,
    RunFile,
    RunKind,
    kind_of,
    read_toml,
    resolve_path,
)
from glm5.train.sections import LengthSection


def resolve_function(value: Any, folder: Path) -> Any:
    """`file.py:name` from `folder`; the name of a module is left as it is."""
    home, colon, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return f"{resolve_path(home, folder)}:{name}" if colon and home.endswith(".py") else value


class RlConfig(RunFile):
    """One run of reinforcement learning; see the sections for the fields and their units."""

    kind: ClassVar[RunKind] = "reinforcement learning"
    free_on_resume: ClassVar[tuple[str, ...]] = (
        *FREE_ON_RESUME,
        "rl.max_tokens_per_micro_batch",
        "rl.samples_every",
        "rollout.url",
        "rollout.connect_timeout_s",
        "rollout.read_timeout_s",
        "rollout.max_attempts",
        "rollout.num_in_flight",
        # a table without settings is recorded as such
        "gap",
        "gap.max_kl",
        "gap.max_abs_diff",
    )
    resolvers: ClassVar[Mapping[tuple[str, str], Resolver]] = {
        **RunFile.resolvers,
        ("data", "prompts"): resolve_path,
        ("reward", "function"): resolve_function,
    }
    # top-k has no gradient and the reward none but through it: as published, it stays frozen
    default_indexer_loss_coeff: ClassVar[float] = 0.0

    data: PromptSection
    train: LengthSection
    rl: RlSection
    rollout: RolloutSection
    reward: RewardSection
    gap: GapSection = GapSection()

    @property
    def num_updates(self) -> int:
        """At most: a step whose groups teach nothing makes none."""
        return self.train.steps * self.rl.updates

    @property
    def updates_told(self) -> str:
        """Which settings say how many updates there are."""
        return f"train.steps {self.train.steps} * rl.updates {self.rl.updates}"

    def problems(self) -> list[str]:
        """What cannot be right though every section is."""
        return [
            *super().problems(),
            *self._engine_problems(),
            *(self._full_problems() if self.lora is None else self._lora_problems()),
            *self._model_problems(),
        ]

    def _engine_problems(self) -> list[str]:
        problems = []
        if self.rollout.engine == "openai" and self.rl.replay != "none":
            problems.append(
                f"rl.replay {self.rl.replay} needs an engine that records its choices: "
                "rollout.engine openai cannot, hf and sglang can"
            )
        ours, theirs = self.model.latent_norm_eps, self.rollout.latent_norm_eps
        if ours is not None and theirs is not None and ours != theirs:
            problems.append(
                f"model.latent_norm_eps {ours} and rollout.latent_norm_eps {theirs} differ, which "
                "is a gap: give the engine's alone"
            )
        return problems

    def _full_problems(self) -> list[str]:
        problems = []
        if self.rollout.fp8_activations:
            problems.append(
                "rollout.fp8_activations needs [lora]: full training hands over weights that are "
                "in no float8"
            )
        if self.rl.kl_coeff:
            problems.append(
                f"rl.kl_coeff {self.rl.kl_coeff} needs [lora]: the reference is the model with its "
                "adapter switched off, and full training keeps no second model"
            )
        if self.rollout.engine == "openai":
            problems.append(
                "full training needs an engine that loads weights: rollout.engine openai takes "
                "adapters alone, so add [lora], or use hf or sglang"
            )
        if self.layout.splits_model:
            problems.append(
                "full training hands whole weights to the engine, which a split model does not "
                "have on one rank: set tp, pp, ep and etp of [layout] to 1, or add [lora]"
            )
        if self.optimizer.weight_decay and not self.indexer_loss_coeff:
            problems.append(
                f"optimizer.weight_decay {self.optimizer.weight_decay} would shrink the indexer, "
                "which has no gradient here: set it to 0, or train.indexer_loss_coeff above 0"
            )
        return problems

    def _lora_problems(self) -> list[str]:
        assert self.lora is not None
        problems = []
        if self.lora.dropout:
            problems.append(
                f"lora.dropout {self.lora.dropout} would train another policy than the one that "
                "is sampled: set it to 0"
            )
        if self.lora.train and self.rl.kl_coeff:
            problems.append(
                f"rl.kl_coeff {self.rl.kl_coeff} needs a model that is the base without its "
                "adapter, but lora.train changes the base"
            )
        if self.lora.train and self.rollout.engine in SERVERS:
            problems.append(
                f"lora.train cannot be sampled: rollout.engine {self.rollout.engine} loads no "
                "whole parameters beside an adapter"
            )
        return problems

    def _model_problems(self) -> list[str]:
        problems = []
        if self.model.mtp:
            problems.append("model.mtp has no loss in reinforcement learning: set it to false")
        if self.indexer_loss_coeff and self.rl.normalise == "sequence":
            problems.append(
                "train.indexer_loss_coeff weighs a loss per token: it needs rl.normalise token"
            )
        return problems


def read_run(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig | RlConfig:
    """The run of a file of either kind: with a table [rl], one of reinforcement learning.

    Raises:
        ConfigError: see `RunFile.from_toml`.
    """
    if kind_of(read_toml(Path(path))) == RlConfig.kind:
        return RlConfig.from_toml(path, overrides)
    return RunConfig.from_toml(path, overrides)
