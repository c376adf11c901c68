"""The sections of a run file that reinforcement learning adds."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from glm5.rl.recorded import Recorded
from glm5.train.sections import Paths, Section
from glm5.train.template import RESERVED_ARGS

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]

SERVERS = ("sglang", "openai")
"""Engines that are servers, which others start."""
DEFAULT_RESAMPLES = 3

# Fields that say nothing of other engines.
_OF_ENGINES = {
    "url": SERVERS,
    "connect_timeout_s": SERVERS,
    "read_timeout_s": SERVERS,
    "max_attempts": SERVERS,
    "num_in_flight": SERVERS,
    "model": ("openai",),
    "log_probs": ("openai",),
    "dtype": ("hf",),
    "max_batch": ("hf",),
    "fp8_activations": ("hf",),
}
_NEEDED = {"sglang": ("url",), "openai": ("url", "model"), "hf": ()}


def _to_ids(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


TokenIds = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_to_ids), Field(min_length=1)
]


class PromptSection(Section):
    """`[data]`: prompts, and the answers that rewards compare with."""

    prompts: Paths
    """Files (.jsonl or .parquet) of rows with `prompt` or `messages`, and perhaps `label`; one or
    a list."""
    shuffle: bool = True
    """Whether the prompts are shuffled in every epoch."""
    max_samples: Count | None = None
    """At most so many prompts are read [prompts]; absent: all."""
    raw: bool = False
    """Whether a `prompt` is the very text that the model goes on from; else it is a user's
    message, which the chat template turns into a prompt."""
    max_prompt_tokens: Count | None = None
    """Longest prompt [tokens]; absent: what a micro-batch and the model's positions leave beside
    rollout.max_new_tokens."""
    too_long: Literal["error", "skip"] = "error"
    """What happens to a longer prompt; skips are counted."""
    chat_template_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Variables handed to the chat template, such as enable_thinking = false."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if taken := [name for name in self.chat_template_args if name in RESERVED_ARGS]:
            raise ValueError(
                f"chat_template_args has {', '.join(taken)}, which transformers takes for itself; "
                "expected names that the chat template reads"
            )
        return self


class RlSection(Section):
    """`[rl]`: what a step samples, and what it learns from it (GRPO, arXiv 2402.03300)."""

    prompts_per_step: Count
    """Prompts of a step, each sampled group_size times [prompts]."""
    group_size: Annotated[int, Field(ge=2)]
    """Completions of a prompt, which are compared with each other [completions]."""
    updates: Count = 1
    """Optimizer updates of a step, each on an equal part of its groups."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The ratio of probabilities, new to old, is clipped to 1 - clip_low from below."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """And to 1 + clip_high from above."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Largest ratio that counts where the advantage is negative; absent: no bound."""
    kl_coeff: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL to the base model, which is the model with its adapter switched off."""
    is_low: Annotated[float, Field(ge=0)] | None = None
    """Lower bound of the importance weight, trainer to engine; absent: none."""
    is_high: Positive | None = None
    """Upper bound; without either bound the weight is 1 (no truncated importance sampling)."""
    normalise: Literal["token", "sequence"] = "token"
    """Whether every token of an update counts alike, or every completion."""
    divide_by_std: bool = True
    """Whether advantages are divided by their group's standard deviation; false: Dr. GRPO."""
    equal_groups: Literal["skip", "resample"] = "skip"
    """What happens to a group with equal rewards, which teaches nothing: it is left out, or other
    prompts are sampled in its place."""
    max_resamples: Count | None = None
    """How often a step samples other prompts in place of such groups, before it goes on with what
    it has; absent: 3."""
    replay: Recorded = "none"
    """Which discrete choices of the rollout the trainer repeats: experts, the indexer's keys."""
    max_tokens_per_micro_batch: Annotated[int, Field(ge=2)]
    """Capacity of a micro-batch, into which whole completions are packed [tokens]."""
    samples_every: Annotated[int, Field(ge=0)] = 1
    """All completions are written to output.dir/samples after every so many steps; 0: never
    [steps]."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        if self.is_low is not None and self.is_high is not None and self.is_low > self.is_high:
            problems.append(f"is_low {self.is_low} is above is_high {self.is_high}")
        if self.updates > self.prompts_per_step:
            problems.append(
                f"updates {self.updates} are more than prompts_per_step {self.prompts_per_step}: "
                "an update needs a group of its own"
            )
        if self.equal_groups == "skip" and self.max_resamples is not None:
            problems.append("max_resamples does nothing with equal_groups skip; remove it")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def num_resamples(self) -> int:
        """At most so many times other prompts are sampled in a step."""
        if self.equal_groups == "skip":
            return 0
        return DEFAULT_RESAMPLES if self.max_resamples is None else self.max_resamples


class RolloutSection(Section):
    """`[rollout]`: which engine samples, and how."""

    engine: Literal["hf", "sglang", "openai"]
    """hf: transformers in this process; or a server that is running: SGLang, or vLLM by OpenAI's
    protocol."""
    max_new_tokens: Count
    """A completion is cut there [tokens]."""
    temperature: Positive = 1.0
    """Divides the logits, in the engine and in the trainer alike."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Below 1 the engine draws from fewer tokens than the trainer's softmax counts: a gap."""
    stop_token_ids: TokenIds | None = None
    """Tokens that end a completion; absent: the model's eos_token_id."""
    latent_norm_eps: Positive | None = None
    """Epsilon of the q and kv latent norms in the engine, which the trainer takes over; absent: of
    servers the model's rms_norm_eps, of hf the trainer's."""
    sleep: bool = False
    """Whether the engine frees what memory it can while the trainer works."""
    url: Annotated[str, Field(min_length=1)] | None = None
    """Where the server listens, such as http://localhost:30000."""
    model: Annotated[str, Field(min_length=1)] | None = None
    """openai: the base model, as the server names it."""
    log_probs: Literal["raw", "processed"] | None = None
    """openai: the server's --logprobs-mode; absent: raw, which needs temperature 1."""
    connect_timeout_s: Positive | None = None
    """Servers: until a connection stands [seconds]."""
    read_timeout_s: Positive | None = None
    """Servers: until a completion is there, whole [seconds]."""
    max_attempts: Count | None = None
    """Servers: how often one request is tried."""
    num_in_flight: Count | None = None
    """Servers: requests at a time."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """hf: type of its copy of the weights; absent: model.dtype."""
    max_batch: Count | None = None
    """hf: completions that are computed together."""
    fp8_activations: bool | None = None
    """hf, of an FP8 checkpoint: whether its linears but kv_b_proj see their inputs in float8, as in
    an engine that serves it; absent: false."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [
            f"{name} does nothing with engine {self.engine}; remove it"
            for name, engines in _OF_ENGINES.items()
            if getattr(self, name) is not None and self.engine not in engines
        ]
        problems += [
            f"engine {self.engine} needs {name}"
            for name in _NEEDED[self.engine]
            if getattr(self, name) is None
        ]
        if self.engine == "openai":
            if self.sleep:
                problems.append("sleep does nothing with engine openai; remove it")
            problems += self._log_prob_problems()
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _log_prob_problems(self) -> list[str]:
        """A server tells log-probabilities before or after it has processed the logits."""
        if self.log_probs == "processed":
            name, value, other = "top_p", self.top_p, "raw"
        else:
            name, value, other = "temperature", self.temperature, "processed"
        if value == 1:
            return []
        return [
            f"{name} {value} is not in the log-probabilities that the server tells: set it to 1, "
            f"or log_probs to {other}, with the server's --logprobs-mode"
        ]


class RewardSection(Section):
    """`[reward]`: what a completion is worth."""

    kind: Literal["math", "exact", "regex", "function"]
    """math: the last \\boxed{} equals the label, by math-verify; exact: the whole text does;
    regex: the first group of the last match does; function: what a Python function returns."""
    pattern: Annotated[str, Field(min_length=1)] | None = None
    """regex: of Python's re."""
    function: Annotated[str, Field(min_length=1)] | None = None
    """function: `package.module:name` or `path/to/file.py:name`, called with text, label and
    row."""
    timeout_seconds: Positive | None = None
    """math: of one comparison [seconds]; absent: 10."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = []
        for name, kind in (("pattern", "regex"), ("function", "function")):
            if self.kind == kind and getattr(self, name) is None:
                problems.append(f"kind {kind} needs {name}")
        for name, kind in (
            ("pattern", "regex"),
            ("function", "function"),
            ("timeout_seconds", "math"),
        ):
            if self.kind != kind and getattr(self, name) is not None:
                problems.append(f"{name} does nothing with kind {self.kind}; remove it")
        if problems:
            raise ValueError("; ".join(problems))
        return self


class GapSection(Section):
    """`[gap]`: how far engine and trainer may be apart before the run stops."""

    max_kl: Positive | None = None
    """Of the KL of a step's response tokens (k3) [nats]; absent: no limit."""
    max_abs_diff: Positive | None = None
    """Of their mean difference in log-probability [nats]; absent: no limit."""
