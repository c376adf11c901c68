"""The verbs of checkpoints and adapters: from one form to another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glm5.cli.choices import (
    Consumer,
    CoreNorms,
    CoreRope,
    CoreSide,
    ExpertLora,
    Form,
    HfDir,
    Json,
    MergedWeights,
)


def convert(
    hf_dir: HfDir,
    ckpt_dir: Annotated[Path, typer.Argument(metavar="CKPT_DIR", help="New folder.")],
    json: Json = False,
) -> None:
    """Turn a Hugging Face checkpoint into a Megatron-Core one."""
    from glm5.cli.convert import run_convert

    run_convert(hf_dir, ckpt_dir, json=json)


def export(
    ckpt_dir: Annotated[
        Path,
        typer.Argument(
            metavar="CKPT_DIR",
            help="A converted checkpoint, a checkpoint of a run, or a run's folder (its newest).",
        ),
    ],
    out_dir: Annotated[Path, typer.Argument(metavar="OUT_DIR", help="New folder.")],
    form: Annotated[
        Form,
        typer.Option(
            "--as",
            help="adapter: factors alone, see --for. merged: base plus adapter. "
            "hf: of a checkpoint that holds every weight.",
        ),
    ],
    consumer: Annotated[
        Consumer, typer.Option("--for", help="What loads the adapter; with --as adapter.")
    ] = Consumer.PEFT,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINEAR",
            help="Leave these linears, such as kv_b_proj, out of what an engine serves: another "
            "model than was trained. May be repeated.",
        ),
    ] = None,
    weights: Annotated[
        MergedWeights | None,
        typer.Option(
            help="How --as merged stores linears. fp8: block-scaled float8. bf16: in the dtype of "
            "the base's config.json. Left out: as the base does.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Write an adapter, a merged or a plain Hugging Face checkpoint, verified by loading it."""
    from glm5.cli.export import run_export

    run_export(
        ckpt_dir,
        out_dir,
        form.value,
        consumer.value,
        without=tuple(without or ()),
        weights=None if weights is None else weights.value,
        json=json,
    )


def convert_core(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN", help="A checkpoint (torch_dist) of the core's own DSA, or HF_DIR."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    to: Annotated[CoreSide, typer.Option("--to", help="What OUT is.")],
    model: Annotated[
        str | None,
        typer.Option(metavar="HF_DIR", help="With --to hf: where config and tokenizer are."),
    ] = None,
    indexer_rope: Annotated[
        CoreRope | None,
        typer.Option(
            help="What the core's indexer rotates of a head; left out, what the names of IN tell, "
            "or what the installed core does."
        ),
    ] = None,
    latent_norms: Annotated[
        CoreNorms | None,
        typer.Option(help="With --to core: fused is what Megatron-Core up to 0.18 has."),
    ] = None,
    json: Json = False,
) -> None:
    """Turn a checkpoint of Megatron-Core's own DSA modules into a Hugging Face one, or back."""
    from glm5.cli.convert_core import run_convert_core

    run_convert_core(
        source,
        target,
        to.value,
        model=model,
        indexer_rope=indexer_rope.value if indexer_rope else None,
        latent_norms=latent_norms.value if latent_norms else None,
        json=json,
    )


def convert_adapter(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="An adapter folder: of PEFT, or as SGLang or vLLM serve."
        ),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    to: Annotated[Consumer, typer.Option("--to", help="What loads the new folder.")],
    model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="The base: folder, config.json, or a name such as GLM-5.2. No weights are read.",
        ),
    ],
    read_as: Annotated[
        Consumer | None,
        typer.Option("--from", help="What IN is for; left out, it shows. An engine's is checked."),
    ] = None,
    expert_lora: Annotated[
        ExpertLora | None,
        typer.Option(help="per_expert gives experts that share a factor one each, exactly."),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LINEAR",
            help="Leave the factors of these linears out, such as kv_b_proj: another model than "
            "was trained. May be repeated.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Turn an adapter folder into one for peft, sglang or vllm, checked by reading it back."""
    from glm5.cli.convert_adapter import ConvertOptions, run_convert_adapter

    options = ConvertOptions(
        to=to.value,
        model=model,
        read_as=read_as.value if read_as else None,
        expert_lora=expert_lora.value if expert_lora else None,
        without=tuple(without or ()),
    )
    run_convert_adapter(source, target, options, json=json)
