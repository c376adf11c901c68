"""The verbs of a model: try one, make one, verify it, train it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glm5.cli.choices import BaseWeights, HfDir, Json, Variant


def demo(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where it writes; an earlier demo is replaced.")
    ] = Path("demo"),
    rl: Annotated[
        bool, typer.Option("--rl", help="Reinforcement learning: sort digits, from rewards alone.")
    ] = False,
    json: Json = False,
) -> None:
    """Run the whole job on a tiny model: verify, train a LoRA, export, reload with peft."""
    if rl:
        from glm5.cli.demo_rl import run_rl_demo

        raise typer.Exit(run_rl_demo(folder, json=json))
    from glm5.cli.demo import run_demo

    raise typer.Exit(run_demo(folder, json=json))


def tiny(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New folder.")],
    variant: Annotated[Variant, typer.Option(help="Which model it is shaped like.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and data, below 2**32.")] = 0,
    fp8: Annotated[bool, typer.Option("--fp8", help="Linears as in an FP8 release.")] = False,
    json: Json = False,
) -> None:
    """Write a tiny Hugging Face checkpoint with random weights, a tokenizer and chat data."""
    from glm5.checkpoint.tiny import write_tiny
    from glm5.cli.output import Output

    path = write_tiny(folder, variant.value, seed, fp8=fp8)
    Output(json).result({"folder": str(path), "variant": variant.value, "seed": seed})


def verify(
    hf_dir: HfDir,
    base_weights: Annotated[
        BaseWeights | None,
        typer.Option(help="How linears are held; left out: fp8 for an FP8 checkpoint, else dtype."),
    ] = None,
    json: Json = False,
) -> None:
    """Compare a checkpoint's model with transformers, below and above topk, packed and unpacked."""
    from glm5.cli.verify import run_verify

    raise typer.Exit(
        run_verify(hf_dir, base_weights=base_weights.value if base_weights else None, json=json)
    )


def train(
    run_file: Annotated[
        Path, typer.Argument(metavar="RUN.toml", help="Run file; recipes/ has commented ones.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Override one setting, such as optimizer.lr=1e-4; may be repeated.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Fine-tune, or learn from rewards with a table rl; Ctrl-C saves, the same command resumes."""
    from glm5.cli.train import run_train

    run_train(run_file, overrides or [], json=json)


def doctor(json: Json = False) -> None:
    """Show what this machine has and which attention backends can run on it."""
    from glm5.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(json=json))
