"""The verbs of `glm5`; heavy packages are imported by the verb that needs them."""

from __future__ import annotations

import signal
import sys
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from glm5.errors import Glm5Error

app = typer.Typer(
    name="glm5",
    help="LoRA and full fine-tuning of the GLM-5 family on Megatron-Core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        from glm5 import __version__

        print(f"glm5 {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    del version  # the callback has seen it


bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

HfDir = Annotated[
    str,
    typer.Argument(metavar="HF_DIR", help="Hugging Face folder, or a repository owner/name."),
]

Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]


class Variant(StrEnum):
    """The published models that a tiny one can be shaped like."""

    GLM_5 = "5"
    GLM_5_1 = "5.1"
    GLM_5_2 = "5.2"


class BaseWeights(StrEnum):
    """How a model holds the linears that an FP8 release quantises."""

    DTYPE = "dtype"
    FP8 = "fp8"


class Form(StrEnum):
    """What an export writes."""

    ADAPTER = "adapter"
    MERGED = "merged"
    HF = "hf"


class Consumer(StrEnum):
    """What an adapter folder is loaded by."""

    PEFT = "peft"
    SGLANG = "sglang"
    VLLM = "vllm"


class MergedWeights(StrEnum):
    """How the weights of a merged checkpoint are stored."""

    BF16 = "bf16"
    FP8 = "fp8"


class ExpertLora(StrEnum):
    """How the adapters of the routed experts are laid out."""

    PER_EXPERT = "per_expert"
    SHARED_OUTER = "shared_outer"


class ExpertAdapters(StrEnum):
    """The same, or none."""

    PER_EXPERT = "per_expert"
    SHARED_OUTER = "shared_outer"
    NONE = "none"


class Recompute(StrEnum):
    """Which activations are computed again in the backward pass."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class CoreSide(StrEnum):
    """What a conversion of a core's own checkpoint makes."""

    HF = "hf"
    CORE = "core"


class CoreRope(StrEnum):
    """Which dimensions of an indexer head a Megatron-Core rotates."""

    FIRST = "first"
    LAST = "last"


class CoreNorms(StrEnum):
    """Where a Megatron-Core has the norms of the latents."""

    FUSED = "fused"
    OWN = "own"


class Mode(StrEnum):
    """What trains."""

    LORA = "lora"
    FULL = "full"


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
def convert(
    hf_dir: HfDir,
    ckpt_dir: Annotated[Path, typer.Argument(metavar="CKPT_DIR", help="New folder.")],
    json: Json = False,
) -> None:
    """Turn a Hugging Face checkpoint into a Megatron-Core one."""
    from glm5.cli.convert import run_convert

    run_convert(hf_dir, ckpt_dir, json=json)


@app.command()
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


@app.command()
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


@app.command("convert-core")
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


@app.command("convert-adapter")
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


@app.command()
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


@app.command()
def doctor(json: Json = False) -> None:
    """Show what this machine has and which attention backends can run on it."""
    from glm5.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(json=json))


@bench.command()
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


@bench.command("node-share")
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


def run() -> None:
    """Runs a verb; an error of the user's is told in full, once, without a traceback."""
    from glm5.cli.quiet import quiet_libraries

    quiet_libraries()
    # as Ctrl-C does, so that whatever is half written is removed on the way out
    before = signal.signal(signal.SIGTERM, _end)
    try:
        app()
    except Glm5Error as error:
        _tell(error)
        sys.exit(error.exit_code)
    except OSError as error:
        # a full disk, a folder without permission: the user's to mend, and nothing half is left
        _tell(error)
        sys.exit(Glm5Error.exit_code)
    except RuntimeError as error:
        # what a process says that waits for one which has stopped
        if not _points_to_another(error):
            raise
        sys.exit(1)
    finally:
        _shut_down()
        signal.signal(signal.SIGTERM, before)


def _tell(error: Exception) -> None:
    """Of several processes one tells an error that all have: rank 0 if it is one of them."""
    from glm5.runtime.failures import rank_of_many, tells

    if tells(str(error)):
        rank = rank_of_many()
        print(f"{'' if rank is None else f'rank {rank}: '}error: {error}", file=sys.stderr)


def _points_to_another(error: RuntimeError) -> bool:
    """Says in one line which process to look at, where another one has an error of its own."""
    from glm5.runtime.failures import rank_of_many, told_by

    other = told_by()
    if other is None:
        return False
    reason = str(error).strip().partition("\n")[0]
    print(f"rank {rank_of_many()}: stopped, see rank {other} ({reason})", file=sys.stderr)
    return True


def _end(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _shut_down() -> None:
    """Ends the process group, if any: `glm5 --help` must not import torch to find out."""
    if "torch" in sys.modules:
        from glm5.runtime.distributed import shut_down

        shut_down()
