"""`glm5 plan`: layouts before any GPU is paid for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from glm5.cli.adapters import check_adapter_rank, check_expert_lora, targets_of
from glm5.cli.output import Output
from glm5.config import Glm5Config
from glm5.errors import CheckFailedError, ConfigError
from glm5.lora.spec import ExpertLora
from glm5.model.schedule import stage_starts
from glm5.plan.hardware import GIB
from glm5.plan.layouts import Placement, parse_layout, place, smallest_world
from glm5.plan.memory import Kind, Memory
from glm5.plan.models import read_model
from glm5.plan.planner import Candidate, StageFigures, best, best_recompute, candidates
from glm5.plan.recipe import recipe
from glm5.plan.workload import BaseWeights, Mode, Workload

_SHOWN = 12


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of the command."""

    gpus: int | None
    gpu_memory_gib: float
    seq_len: int
    mode: Mode
    base_weights: BaseWeights
    targets: str | None
    adapter_rank: int | None
    expert_lora: ExpertLora | None
    layout: str | None
    layers_per_stage: str | None
    dry_run: bool
    mtp: bool
    out: Path | None


def run_plan(model: str, options: PlanOptions, *, json: bool) -> int:
    """Lists layouts, explains one, or dry-runs it; returns the exit code.

    Raises:
        ConfigError: options that do not go together, or a taken `out`. ConfigError, LayoutError: as
        in training. CheckFailedError: a dry run found a mistake.
    """
    output = Output(json)
    _check(options)
    name, glm5 = read_model(model)
    work = _work(options)
    if options.layout is None:
        return _choose(output, name, glm5, work, options)
    layout = parse_layout(options.layout)
    split = _split(options.layers_per_stage)
    placed = place(glm5, layout, options.gpus or smallest_world(layout), split)
    if options.dry_run:
        return _dry_run(output, glm5, placed, include_mtp=options.mtp)
    candidate = best_recompute(glm5, placed, work, options.gpu_memory_gib)
    _explain(output, candidate, options.gpu_memory_gib)
    return _finish(output, name, [candidate], options)


def _check(options: PlanOptions) -> None:
    if options.mtp and not options.dry_run:
        raise ConfigError(
            "--mtp says what a dry run builds",
            got="--mtp without --dry-run",
            remedy="add --dry-run, or leave --mtp out",
        )
    if options.base_weights == "fp8" and options.mode == "full":
        raise ConfigError(
            "weights in float8 do not train",
            got="--base-weights fp8 with --mode full",
            remedy="use --mode lora, or leave --base-weights out",
        )
    adapters = {
        "--targets": options.targets,
        "--adapter-rank": options.adapter_rank,
        "--expert-lora": options.expert_lora,
    }
    given = [name for name, value in adapters.items() if value is not None]
    if given and (options.mode == "full" or options.dry_run):
        raise ConfigError(
            f"{' and '.join(given)} would do nothing",
            got="--dry-run, which builds no adapters" if options.dry_run else "--mode full",
            remedy="leave one of them out",
        )
    out = options.out
    if out is None:
        return
    if options.dry_run:
        raise ConfigError(
            "a dry run writes no run file",
            got=f"--dry-run with --out {out}",
            remedy="plan without --dry-run to write one",
        )
    if out.is_file() or out.is_dir():
        raise ConfigError(f"{out} already exists", remedy="choose another name, or remove it first")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder for {out}", remedy="make the folder first")


def _work(options: PlanOptions) -> Workload:
    """What trains; an option that is not given leaves what the workload has."""
    work = Workload(mode=options.mode, base_weights=options.base_weights, seq_len=options.seq_len)
    if options.targets is not None:
        work = replace(work, targets=targets_of(options.targets))
    if options.adapter_rank is not None:
        work = replace(work, adapter_rank=options.adapter_rank)
    if options.expert_lora is not None:
        check_expert_lora(options.expert_lora, work.targets)
        work = replace(work, expert_lora=options.expert_lora)
    check_adapter_rank(work.adapter_rank, work.expert_lora, work.targets)
    return work


def _choose(
    output: Output, name: str, glm5: Glm5Config, work: Workload, options: PlanOptions
) -> int:
    if options.gpus is None or options.dry_run or options.layers_per_stage is not None:
        raise ConfigError(
            "there is nothing to plan for",
            expected="--gpus N to choose a layout, or --layout tp=8,pp=4,ep=32 to look at one",
            remedy="--dry-run and --layers-per-stage go with --layout",
        )
    found = candidates(glm5, options.gpus, work, options.gpu_memory_gib)
    if not found:
        raise ConfigError(
            "this model has no layout on so many GPUs",
            got=f"{options.gpus} GPUs",
            expected="a number that tp, pp and ep divide",
            remedy="try a multiple of 8",
        )
    output.table(
        f"{name}, {_spell_work(work)}, {work.seq_len:,} tokens per row, {options.gpus} GPUs: "
        f"the best {min(_SHOWN, len(found))} of {len(found)} layouts",
        ("layout", "recompute", "GiB of tensors", "GiB needed", "tokens/s at most", "fits"),
        [_row(candidate, options.gpu_memory_gib) for candidate in found[:_SHOWN]],
    )
    chosen = best(found, options.gpu_memory_gib)
    if chosen is not None:
        _explain(output, chosen, options.gpu_memory_gib)
    return _finish(output, name, found, options)


def _finish(output: Output, name: str, found: Sequence[Candidate], options: PlanOptions) -> int:
    """Writes the recipe of the best one, and says how that went."""
    chosen = best(found, options.gpu_memory_gib)
    if chosen is not None and options.out is not None:
        options.out.write_text(recipe(name, chosen), encoding="utf-8")
    if output.as_json:
        output.result(
            {
                "model": name,
                "layouts": [_figures(candidate, options.gpu_memory_gib) for candidate in found],
                "best": None if chosen is None else _figures(chosen, options.gpu_memory_gib),
                "recipe": str(options.out) if chosen is not None and options.out else None,
            }
        )
    elif chosen is not None:
        told = {"best": f"{_spell(chosen.place)}, recompute {chosen.work.recompute}"}
        if options.out is not None:
            told["recipe"] = str(options.out)
        output.result(told)
    if chosen is not None:
        return 0
    least = min(found, key=lambda candidate: candidate.needed)
    output.say(
        f"none fits into {options.gpu_memory_gib:g} GiB: {_spell(least.place)} needs least, "
        f"{least.needed / GIB:.0f} GiB per GPU; use more GPUs or shorter rows"
    )
    return CheckFailedError.exit_code


def _explain(output: Output, candidate: Candidate, gpu_memory_gib: float) -> None:
    """Draws the stages, and says what fills a GPU of each."""
    output.columns(
        f"{_spell(candidate.place)}, recompute {candidate.work.recompute}: layers of each stage "
        "(F full, s shared indexer; d dense, M mixture of experts)",
        ("pp", "layers", "indexers", "MLPs"),
        _drawing(candidate),
    )
    output.columns(
        "GiB per GPU, and milliseconds of a micro-batch at least",
        ("pp", *(field.name for field in fields(Memory)), "peak", "ms"),
        [(rank, *_parts(figures)) for rank, figures in enumerate(candidate.stages)],
    )
    output.say(
        f"{candidate.needed / GIB:.1f} of {gpu_memory_gib:g} GiB needed on the fullest GPU; "
        f"at most {candidate.tokens_per_second:,.0f} tokens/s on {candidate.place.gpus} GPUs"
    )


def _drawing(candidate: Candidate) -> list[tuple[int, str, str, str]]:
    """One row per pipeline rank: its layers, by interleaved stage."""
    split, pp = candidate.place.layers_per_stage, candidate.place.layout.pp
    spans = [
        f"{start}-{start + n - 1}" for start, n in zip(stage_starts(split), split, strict=True)
    ]
    rows = []
    for rank, figures in enumerate(candidate.stages):
        indexers = " ".join(_letters(chunk, 0, "sF") for chunk in figures.stage.chunks)
        mlps = " ".join(_letters(chunk, 1, "dM") for chunk in figures.stage.chunks)
        rows.append((rank, ", ".join(spans[rank::pp]), indexers, mlps))
    return rows


def _parts(figures: StageFigures) -> tuple[float | int, ...]:
    """GiB of each part and of all, and whole milliseconds."""
    parts = [value / GIB for value in asdict(figures.memory).values()]
    return *parts, figures.memory.peak / GIB, round(figures.seconds.total * 1e3)


def _letters(chunk: Sequence[Kind], index: int, letters: str) -> str:
    return "".join(letters[kind[index]] for kind in chunk)


def _dry_run(output: Output, glm5: Glm5Config, placed: Placement, *, include_mtp: bool) -> int:
    from glm5.cli.progress import progress_bar
    from glm5.plan.dry_run import dry_run

    with progress_bar("shards", quiet=output.as_json) as progress:
        done = dry_run(
            glm5,
            placed.layout,
            include_mtp=include_mtp,
            layers_per_stage=placed.layers_per_stage,
            progress=progress,
        )
    output.say(
        f"{placed.gpus} ranks hold {done.num_shards} distinct shards; together they read each of "
        f"{done.num_tensors:,} tensors ({done.num_elements:,} weights) exactly once per replica, "
        "and make each again"
    )
    if done.num_left_out:
        output.say(
            f"{done.num_left_out:,} tensors of the MTP layer are left out; --mtp includes them"
        )
    output.result({"ok": True, **asdict(done)} if output.as_json else {"verdict": "exact"})
    return 0


def _split(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(
            "--layers-per-stage is not a list of numbers", got=text, expected="such as 18,20,20,20"
        ) from None


def _spell(placed: Placement) -> str:
    axes = asdict(placed.layout) | {"dp": placed.dp}
    return " ".join(f"{axis}{size}" for axis, size in axes.items() if size > 1) or "one rank"


def _spell_work(work: Workload) -> str:
    return f"{work.mode} over FP8 weights" if work.base_weights == "fp8" else work.mode


def _row(candidate: Candidate, gpu_memory_gib: float) -> tuple[Any, ...]:
    return (
        _spell(candidate.place),
        candidate.work.recompute,
        f"{candidate.peak / GIB:.1f}",
        f"{candidate.needed / GIB:.1f}",
        f"{candidate.tokens_per_second:,.0f}",
        "yes" if candidate.fits(gpu_memory_gib) else "no",
    )


def _figures(candidate: Candidate, gpu_memory_gib: float) -> dict[str, Any]:
    return {
        "layout": asdict(candidate.place.layout) | {"dp": candidate.place.dp},
        "layers_per_stage": list(candidate.place.layers_per_stage),
        "recompute": candidate.work.recompute,
        "fits": candidate.fits(gpu_memory_gib),
        "peak_bytes": candidate.peak,
        "needed_bytes": round(candidate.needed),
        "tokens_per_second_at_most": candidate.tokens_per_second,
        "stages": [
            {"memory_bytes": asdict(figures.memory), "seconds": asdict(figures.seconds)}
            for figures in candidate.stages
        ],
    }
