"""Short runs of reinforcement learning on tiny checkpoints, and an engine that costs nothing."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from glm5.errors import EngineError
from glm5.rl.products import Products
from glm5.rl.recorded import Recorded
from glm5.rl.rollout import Request, Rollout, Sampling
from glm5.rl.run_config import RlConfig
from tests.training import with_sections

TIMES = ("_seconds", "tokens_per_second")


def write_prompts(path: Path, count: int = 6) -> str:
    """Prompts of several lengths, each with a label; returns the path."""
    rows = [{"prompt": "repeat " + "ab" * (n % 4 + 1), "label": "a"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rl_tables(hf_dir: Path, out_dir: Path, **sections: dict[str, Any] | None) -> dict[str, Any]:
    """A LoRA run of three steps in fp32; a section given as None is left out."""
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    tables: dict[str, Any] = {
        "model": {"path": str(hf_dir), "dtype": "float32"},
        "data": {"prompts": write_prompts(out_dir.parent / "prompts.jsonl")},
        "lora": {"rank": 2, "alpha": 4.0},
        "optimizer": {"lr": 3e-3, "schedule": "constant"},
        "train": {"steps": 3},
        "rl": {"prompts_per_step": 3, "group_size": 4, "max_tokens_per_micro_batch": 64},
        "rollout": {"engine": "hf", "max_new_tokens": 6},
        "reward": {"kind": "function", "function": f"{Path(__file__)}:printable_share"},
        "output": {"dir": str(out_dir)},
    }
    return with_sections(tables, sections)


def rl_config(hf_dir: Path, out_dir: Path, **sections: dict[str, Any] | None) -> RlConfig:
    """The same as an RlConfig."""
    return RlConfig.from_dict(rl_tables(hf_dir, out_dir, **sections), source="the test")


def printable_share(text: str, label: object, row: object) -> float:
    """A reward that differs between most completions of a random model."""
    return sum(character.isalnum() for character in text) / max(1, len(text))


def without_times(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics, less what no two runs share."""
    return [
        {key: value for key, value in line.items() if not key.endswith(TIMES)} for line in lines
    ]


@dataclass
class FakeEngine:
    """An engine whose tokens follow from the seeds of the requests, whatever the weights are.

    change: what becomes of the rollouts of a call, as a broken engine would have it.
    """

    vocab: int = 100
    change: Callable[[list[Rollout]], list[Rollout]] = lambda rollouts: rollouts
    calls: list[list[Request]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    version: int = -1
    can_record: bool = False
    products: Products = "untold"

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, record: Recorded
    ) -> list[Rollout]:
        self.calls.append(list(requests))
        self.events.append("generate")
        return self.change([self._rollout(request, sampling) for request in requests])

    def _rollout(self, request: Request, sampling: Sampling) -> Rollout:
        draw = np.random.default_rng(request.seed)
        length = int(draw.integers(1, sampling.max_new_tokens + 1))
        return Rollout(
            request=request.name,
            prompt_ids=request.prompt_ids,
            response_ids=draw.integers(32, self.vocab, length).astype(np.int32),
            log_probs=np.full(length, -4.0, np.float32),
            finish="length",
            choices=None,
            adapter_version=self.version,
        )

    def load_adapter(self, folder: Path, version: int) -> None:
        assert (folder / "adapter_model.safetensors").is_file()
        self.version = version
        self.events.append(f"adapter {version}")

    def load_model(self, folder: Path, version: int) -> None:
        assert (folder / "config.json").is_file()
        self.version = version
        self.events.append(f"model {version}")

    def sleep(self) -> None:
        self.events.append("sleep")

    def wake(self) -> None:
        self.events.append("wake")

    def close(self) -> None:
        self.events.append("close")


def dies_in_call(number: int) -> Callable[[list[Rollout]], list[Rollout]]:
    """A change for `FakeEngine`: the call of that number (from 1) fails."""
    calls = 0

    def change(rollouts: list[Rollout]) -> list[Rollout]:
        nonlocal calls
        calls += 1
        if calls == number:
            raise EngineError("the server is gone")
        return rollouts

    return change
