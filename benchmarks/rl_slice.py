"""Three steps of GRPO on five layers of GLM-5.2 at full width, random weights, on one GPU.

    python -m benchmarks.rl_slice FOLDER [--experts 256] [--replay both] [--steps 3] [--json FILE]

Writes the model to FOLDER (17 GB with 64 experts a layer, 46 GB with 256), samples from it with
transformers in the same process, at lengths above index_topk, trains a LoRA on what was sampled,
and prints for every step how far engine and trainer are apart, tokens per second and memory. With
`--narrow 16` the widths are a sixteenth, which a CPU can compute.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.plan_memory import CASES, config_of
from glm5.checkpoint.hf_layout import hf_tensors
from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.cli.quiet import quiet_libraries
from glm5.config import Glm5Config
from glm5.rl.recorded import Recorded
from glm5.rl.run import train_rl
from glm5.rl.run_config import RlConfig
from glm5.runtime.distributed import default_device
from glm5.train.metrics import read_metrics

SHARD_BYTES = 2**32
NUM_PROMPTS, GROUP_SIZE = 2, 4
PROMPT_OVER_TOPK, NEW_TOKENS = 256, 64
SHOWN = (
    "reward", "gap_abs_diff", "gap_kl", "gap_over_1_nat", "gap_routing_overlap", "gap_topk_overlap",
    "grad_norm",
    "rollout_tokens_per_second", "trained_tokens_per_second",
    "step_seconds", "peak_gib",
)  # fmt: skip
REWARD = '''"""The share of even numbers among the words: something to differ in."""


def even(text: str, label: object, row: object) -> float:
    numbers = [int(word[1:]) for word in text.split()]
    return sum(number % 2 == 0 for number in numbers) / max(1, len(numbers))
'''


def write_model(folder: Path, config: Glm5Config) -> None:
    """A checkpoint of random bf16 weights whose vocabulary is the words w0, w1, ..."""
    specs = hf_tensors(config)
    plan = {name: (tuple(spec.shape), torch.bfloat16) for name, spec in specs.items()}
    with SafetensorsWriter(folder, plan, SHARD_BYTES) as writer:
        for name, tensor in draw(config):
            writer.add(name, tensor)
        raw = config.to_hf_dict() | {"dtype": "bfloat16"}
        writer.add_text("config.json", json.dumps(raw, indent=2) + "\n")
        for name, text in tokenizer_files(config.vocab_size).items():
            writer.add_text(name, text)


def draw(config: Glm5Config) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator(default_device()).manual_seed(0)
    for name, spec in hf_tensors(config).items():
        noise = torch.randn(spec.shape, generator=generator, device=default_device())
        wide = noise if name == "model.embed_tokens.weight" else noise * spec.shape[-1] ** -0.5
        drawn = 1 + 0.2 * noise if len(spec.shape) == 1 else wide
        yield name, drawn.to(torch.bfloat16).cpu()


def tokenizer_files(vocab_size: int) -> dict[str, str]:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = {f"w{i}": i for i in range(vocab_size)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "w0",
        "eos_token": "w1",
        "unk_token": "w0",
        "chat_template": "{% for message in messages %}{{ message.content }} {% endfor %}",
    }
    return {"tokenizer.json": tokenizer.to_str(), "tokenizer_config.json": json.dumps(settings)}


def write_prompts(path: Path, config: Glm5Config) -> None:
    words = random.Random(0)
    length = config.index_topk + PROMPT_OVER_TOPK
    rows = [
        {"prompt": " ".join(f"w{words.randrange(2, config.vocab_size)}" for _ in range(length))}
        for _ in range(2 * NUM_PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_file(folder: Path, config: Glm5Config, steps: int, replay: str) -> dict[str, Any]:
    whole = config.index_topk + PROMPT_OVER_TOPK + NEW_TOKENS
    return {
        "model": {"path": str(folder / "model"), "dtype": "bfloat16", "recompute": "full"},
        "data": {"prompts": str(folder / "prompts.jsonl"), "raw": True},
        "lora": {"rank": 16, "alpha": 32.0},
        "optimizer": {"lr": 1e-4},
        "train": {"steps": steps},
        "rl": {
            "prompts_per_step": NUM_PROMPTS,
            "group_size": GROUP_SIZE,
            "replay": replay,
            "max_tokens_per_micro_batch": 4 * whole,
        },
        "rollout": {"engine": "hf", "max_new_tokens": NEW_TOKENS, "max_batch": GROUP_SIZE},
        "reward": {"kind": "function", "function": f"{folder / 'reward.py'}:even"},
        "output": {"dir": str(folder / f"run-{replay}")},
    }


def lines(run: RlConfig, peak_bytes: int) -> Iterator[dict[str, float]]:
    """A line for every step; the peak is that of all."""
    for found in read_metrics(run.output.dir):
        found["rollout_tokens_per_second"] = found["rollout_tokens"] / found["rollout_seconds"]
        found["trained_tokens_per_second"] = found["tokens"] / (
            found["score_seconds"] + found["update_seconds"]
        )
        found["peak_gib"] = peak_bytes / 2**30
        yield {name: found[name] for name in SHOWN if name in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=256, help="routed experts of a layer")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--replay", choices=get_args(Recorded), default="both")
    parser.add_argument("--narrow", type=int, default=1, help="divides every width")
    parser.add_argument("--json", type=Path, help="also append one line a step to this file")
    args = parser.parse_args()
    quiet_libraries()
    config = config_of(replace(CASES[0], num_experts=args.experts), narrow=args.narrow)
    args.folder.mkdir(parents=True, exist_ok=True)
    if not (args.folder / "model").exists():
        write_model(args.folder / "model", config)
    write_prompts(args.folder / "prompts.jsonl", config)
    (args.folder / "reward.py").write_text(REWARD)
    run = RlConfig.from_dict(
        run_file(args.folder, config, args.steps, args.replay), source="the benchmark"
    )
    train_rl(run, say=print, quiet=True)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    for step, found in enumerate(lines(run, peak), start=1):
        shown = ", ".join(f"{name} {value:.3g}" for name, value in found.items())
        print(f"step {step}: {shown}", flush=True)
        if args.json is not None:
            note = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "op": "rl_slice"}
            note |= {"experts": args.experts, "replay": args.replay, "step": step}
            with args.json.open("a") as file:
                file.write(json.dumps(note | found) + "\n")


if __name__ == "__main__":
    main()
