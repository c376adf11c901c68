"""The verbs that tell what a run would take: plan, and bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from glm5.cli.choices import BaseWeights, ExpertAdapters, Json, Mode, Recompute


def plan(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder, config.json, or a name such as GLM-5.2.")
    ],
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=16384, help="List the layouts of so many GPUs."),
    ] = None,
    gpu_memory_gib: Annotated[float, typer.Option(min=1, help="Memory of one GPU.")] = 141.0,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of a packed row.")] = 8192,
    mode: Annotated[Mode, typer.Option(help="What trains.")] = Mode.LORA,
    base_weights: Annotated[
        BaseWeights, typer.Option(help="LoRA: frozen linears in bf16, or in float8 with scales.")
    ] = BaseWeights.DTYPE,
    targets: Annotated[
        str | None,
        typer.Option(metavar="LINEAR,...", help="LoRA: which linears; the attention's without it."),
    ] = None,
    adapter_rank: Annotated[
        int | None, typer.Option(min=1, help="LoRA: inner width; 16 without it.")
    ] = None,
    expert_lora: Annotated[
        ExpertAdapters | None, typer.Option(help="LoRA: adapters of routed experts.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="tp=8,pp=4,ep=32", help="Explain this layout.")
    ] = None,
    layers_per_stage: Annotated[
        str | None, typer.Option(metavar="18,20,...", help="Decoder layers of each stage.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build every rank's shard, without memory.")
    ] = False,
    mtp: Annotated[bool, typer.Option("--mtp", help="Dry run: with the MTP layer.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN.toml", help="Write the best layout as a run file.")
    ] = None,
    json: Json = False,
) -> None:
    """Choose, explain or dry-run a parallel layout; needs neither a GPU nor the weights."""
    from glm5.cli.plan import PlanOptions, run_plan

    options = PlanOptions(
        gpus=gpus,
        gpu_memory_gib=gpu_memory_gib,
        seq_len=seq_len,
        mode=mode.value,
        base_weights=base_weights.value,
        targets=targets,
        adapter_rank=adapter_rank,
        expert_lora=None if expert_lora is None else expert_lora.value,
        layout=layout,
        layers_per_stage=layers_per_stage,
        dry_run=dry_run,
        mtp=mtp,
        out=out,
    )
    raise typer.Exit(run_plan(model, options, json=json))


def kernels(
    peers: Annotated[
        bool,
        typer.Option(
            "--peers", help="Also time plain PyTorch and the installed kernels of others."
        ),
    ] = False,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only cases whose names hold this, as 'experts'.")
    ] = "",
    roofline: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw a roofline plot to this file.")
    ] = None,
    json: Json = False,
) -> None:
    """Check, then time the fused kernels on this machine's GPU."""
    from glm5.cli.bench import run_bench_kernels

    run_bench_kernels(with_peers=peers, only=only, roofline=roofline, json=json)


def node_share(
    layout: Annotated[
        str,
        typer.Option(
            metavar="ep=8,cp=8", help="Of at most 8 GPUs, such as ep=8,cp=8 or tp=8,ep=8."
        ),
    ],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="Folder, config.json, or a name such as GLM-5.2.")
    ] = "GLM-5.2",
    rank: Annotated[
        int, typer.Option(min=0, help="Whose share; the last rank along cp has the most keys.")
    ] = 0,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Take the first layers alone, as many as this.")
    ] = None,
    narrow: Annotated[
        int, typer.Option(min=1, help="Divide all widths and the number of experts by this number.")
    ] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank.")] = 8192,
    document_tokens: Annotated[
        int | None, typer.Option(min=1, help="Of each document; one as long as the row without it.")
    ] = None,
    base_weights: Annotated[
        BaseWeights, typer.Option(help="Frozen linears in float8 with scales, or in bf16.")
    ] = BaseWeights.FP8,
    fp8_compute: Annotated[
        bool, typer.Option("--fp8-compute", help="Multiply in float8, too.")
    ] = False,
    recompute: Annotated[
        Recompute, typer.Option(help="Activations that are computed again.")
    ] = Recompute.FULL,
    targets: Annotated[
        str, typer.Option(metavar="LINEAR,...", help="Linears that get adapters.")
    ] = "q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj,gate_proj,up_proj,down_proj",
    adapter_rank: Annotated[int, typer.Option(min=1, help="Inner width of the adapters.")] = 16,
    expert_lora: Annotated[
        ExpertAdapters | None,
        typer.Option(help="Adapters of routed experts; shared_outer without it."),
    ] = None,
    steps: Annotated[int, typer.Option(min=3, help="Two warm up, the others are timed.")] = 5,
    limit_gib: Annotated[
        float, typer.Option(min=0.001, help="GPU memory that the tensors may take.")
    ] = 132.0,
    json: Json = False,
) -> None:
    """Train one rank's share of a node on this device: memory, time, bytes that would travel."""
    from glm5.cli.bench_node import NodeShareOptions, run_bench_node_share

    options = NodeShareOptions(
        model=model,
        layout=layout,
        rank=rank,
        layers=layers,
        narrow=narrow,
        tokens=tokens,
        document_tokens=document_tokens,
        base_weights=base_weights.value,
        fp8_compute=fp8_compute,
        recompute=recompute.value,
        targets=targets,
        adapter_rank=adapter_rank,
        expert_lora=None if expert_lora is None else expert_lora.value,
        steps=steps,
        limit_gib=limit_gib,
    )
    run_bench_node_share(options, json=json)
