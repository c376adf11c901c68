"""`glm5 bench node-share`: one rank's share of a node, trained on this device alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from glm5.cli.adapters import check_adapter_rank, check_expert_lora, targets_of
from glm5.cli.output import Output
from glm5.errors import CheckFailedError, ConfigError, LayoutError
from glm5.lora.spec import ExpertLora
from glm5.plan.hardware import (
    COLLECTIVE_START_S,
    GIB,
    GPUS_PER_NODE,
    NVLINK_BYTES_PER_S,
    NVLINK_SHARE,
)
from glm5.plan.workload import BaseWeights, Recompute

if TYPE_CHECKING:
    from glm5.node_share.measure import Measured, Share
    from glm5.node_share.node import Collective, Prediction


# As in the recipe of one node.
_EXPERT_LORA: ExpertLora = "shared_outer"


@dataclass(frozen=True, kw_only=True)
class NodeShareOptions:
    """The options of the command."""

    model: str
    layout: str
    rank: int
    layers: int | None
    narrow: int
    tokens: int
    document_tokens: int | None
    base_weights: BaseWeights
    fp8_compute: bool
    recompute: Recompute
    targets: str
    adapter_rank: int
    expert_lora: ExpertLora | None
    steps: int
    limit_gib: float


def run_bench_node_share(options: NodeShareOptions, *, json: bool) -> None:
    """Prints what the share took, what its links would take, and what the node would do.

    Raises:
        ConfigError, LayoutError: options that do not fit the model or each other.
        CheckFailedError: it does not fit into `limit_gib`.
    """
    output = Output(json)
    share = share_of(options)
    from glm5.node_share.measure import measure_share
    from glm5.node_share.node import predict
    from glm5.runtime.distributed import default_device

    device, predicted = default_device(), predict(share)
    output.say(f"{_describe(share)}; predicted peak {predicted.memory.peak / GIB:.1f} GiB")
    measured = measure_share(share, device, limit_gib=options.limit_gib, say=output.say)
    show(output, options, share, measured, predicted)
    _check(options, measured)


def share_of(options: NodeShareOptions) -> Share:
    """The share that the options describe; raises as run_bench_node_share does."""
    from glm5.node_share.cut import cut_model
    from glm5.node_share.measure import Share
    from glm5.plan.layouts import parse_layout, place, smallest_world
    from glm5.plan.models import read_model
    from glm5.plan.workload import Workload

    layout = parse_layout(options.layout)
    gpus = smallest_world(layout)
    if layout.pp > 1 or gpus > GPUS_PER_NODE:
        raise LayoutError(
            "this is not a layout of one node without pipeline stages",
            got=options.layout,
            expected=f"pp 1, and at most {GPUS_PER_NODE} ranks",
            remedy="ep=8,cp=8 or tp=8,ep=8",
        )
    if options.rank >= gpus:
        raise LayoutError(
            "the layout has no such rank", got=options.rank, expected=f"0 to {gpus - 1}"
        )
    if options.fp8_compute and options.base_weights != "fp8":
        raise ConfigError(
            "bf16 weights are not multiplied in float8",
            got="--fp8-compute with --base-weights dtype",
            remedy="leave one of them out",
        )
    _, glm5 = read_model(options.model)
    config = cut_model(glm5, layers=options.layers, narrow=options.narrow)
    targets = targets_of(options.targets)
    if options.expert_lora is not None:
        check_expert_lora(options.expert_lora, targets)
    expert_lora = options.expert_lora or _EXPERT_LORA
    check_adapter_rank(options.adapter_rank, expert_lora, targets)
    seq_len = options.tokens * layout.cp * layout.tp
    work = Workload(
        base_weights=options.base_weights,
        seq_len=seq_len,
        recompute=options.recompute,
        adapter_rank=options.adapter_rank,
        targets=targets,
        expert_lora=expert_lora,
    )
    return Share(
        config,
        place(config, layout, gpus),
        options.rank,
        work,
        min(options.document_tokens or seq_len, seq_len),
        options.steps,
        options.fp8_compute,
    )


def show(
    output: Output,
    options: NodeShareOptions,
    share: Share,
    measured: Measured,
    predicted: Prediction,
) -> None:
    """The tables, or the JSON object."""
    memory = _memory_rows(measured, predicted, options.limit_gib)
    output.columns(f"GiB on rank {share.rank}", ("part", f"{'measured':>8}", "predicted"), memory)
    moments = ", ".join(f"{name} {count / GIB:.2f}" for name, count in predicted.moments.items())
    output.say(f"moments that may be the fullest, as predicted [GiB]: {moments}")
    if measured.is_timed:
        _show_times(output, share, measured)
    if output.as_json:
        output.result(_result(options, share, measured, predicted))


def _show_times(output: Output, share: Share, measured: Measured) -> None:
    from glm5.node_share.node import collectives, exchange_seconds, tokens_per_second

    step = measured.step
    kinds = collectives(step.calls)
    output.columns(
        f"collectives of a step; NVLink at {NVLINK_SHARE:.0%} of {NVLINK_BYTES_PER_S / 1e9:.0f} "
        f"GB/s per direction, {COLLECTIVE_START_S * 1e6:.0f} us to start (assumed)",
        ("collective", "ranks", "calls", f"{'GB':>7}", "copies ms", "NVLink ms"),
        [_collective_row(kind) for kind in kinds],
    )
    rows = measured.routed_rows
    if rows:
        output.say(
            f"rows per layer for this rank's experts: mean {_mean(rows):,.0f}, "
            f"most {max(rows):,}; balanced routing would send {share.balanced_rows:,}"
        )
    output.say(
        f"step without communication {step.own_seconds:.3f} s "
        f"({step.seconds:.3f} s less {step.copy_seconds:.3f} s in the stand-ins' copies), "
        f"communication {exchange_seconds(step.calls):.3f} s, none of it hidden"
    )
    output.say(
        f"predicted for {share.place.gpus} GPUs as fast as this rank: "
        f"{tokens_per_second(share, measured):,.0f} tokens/s"
    )
    if share.place.layout.cp > 1:
        output.say(
            f"the rank with the most keys is the last along cp: compare --rank "
            f"{_last_cp_rank(share)}, the slowest rank sets the node's pace"
        )


def _memory_rows(
    measured: Measured, predicted: Prediction, limit_gib: float
) -> list[tuple[str, str, str]]:
    memory = predicted.memory
    passing = memory.activations + memory.buffers + memory.transient
    rows: list[tuple[str, float, float | None]] = [
        *((f"  {name}", count, None) for name, count in measured.weights.items()),
        ("weights and adapters", sum(measured.weights.values()), memory.weights),
        ("gradients", measured.gradients, memory.gradients),
        ("optimizer", measured.optimizer, memory.optimizer),
        ("activations and the fullest moment", measured.passing, passing),
        ("peak of tensors", measured.peak, memory.peak),
        ("peak reserved", measured.reserved, None),
        ("outside the allocator", measured.outside, None),
        ("limit", limit_gib * GIB, None),
    ]
    return [
        (name, f"{count / GIB:8.3f}", "" if other is None else f"{other / GIB:9.3f}")
        for name, count, other in rows
    ]


def _collective_row(kind: Collective) -> tuple[str, str, int, str, str, str]:
    return (
        kind.op,
        kind.axis,
        kind.num_calls,
        f"{kind.num_bytes / 1e9:7.3f}",
        f"{kind.copy_seconds * 1e3:9.2f}",
        f"{kind.link_seconds * 1e3:9.2f}",
    )


def _result(
    options: NodeShareOptions, share: Share, measured: Measured, predicted: Prediction
) -> dict[str, Any]:
    import torch

    from glm5.node_share.node import collectives, exchange_seconds, tokens_per_second

    times: dict[str, Any] = {}
    if measured.is_timed:
        step = measured.step
        times = {
            "step_seconds_without_communication": step.own_seconds,
            "copy_seconds": step.copy_seconds,
            "exchange_seconds": exchange_seconds(step.calls),
            "collectives": [asdict(kind) for kind in collectives(step.calls)],
            "tokens_per_second": tokens_per_second(share, measured),
        }
    on_gpu = torch.cuda.is_available()
    return {
        "options": asdict(options),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
        "gpus": share.place.gpus,
        "layers": share.config.num_hidden_layers,
        "tokens_per_step": share.tokens_per_step,
        "fits": _fits(options, measured),
        "out_of_memory": measured.out_of_memory,
        "weight_bytes": measured.weights,
        "gradient_bytes": measured.gradients,
        "optimizer_bytes": measured.optimizer,
        "passing_bytes": measured.passing,
        "peak_bytes": measured.peak,
        "reserved_bytes": measured.reserved,
        "outside_bytes": measured.outside,
        "predicted_bytes": asdict(predicted.memory),
        "predicted_peak_bytes": predicted.memory.peak,
        "predicted_moments_bytes": predicted.moments,
        "routed_rows": {"mean": _mean(measured.routed_rows), "most": max(measured.routed_rows)}
        if measured.routed_rows
        else None,
        "balanced_rows": share.balanced_rows,
        "steps": [
            {"loss": step.loss, "seconds": step.seconds, "copy_seconds": step.copy_seconds}
            for step in measured.steps
        ],
        **times,
    }


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / len(numbers)


def _fits(options: NodeShareOptions, measured: Measured) -> bool:
    return not measured.out_of_memory and measured.peak <= options.limit_gib * GIB


def _check(options: NodeShareOptions, measured: Measured) -> None:
    if not _fits(options, measured):
        raise CheckFailedError(
            "the share does not fit",
            got=measured.out_of_memory or f"a peak of {measured.peak / GIB:.1f} GiB",
            expected=f"at most {options.limit_gib:g} GiB",
            remedy="see the parts above: fewer tokens, targets or ranks of adapters",
        )


def _describe(share: Share) -> str:
    axes = " ".join(f"{a}{n}" for a, n in asdict(share.place.layout).items() if n > 1)
    return (
        f"rank {share.rank} of {axes or 'one rank'}: {share.config.num_hidden_layers} layers, "
        f"a row of {share.work.seq_len:,} tokens"
    )


def _last_cp_rank(share: Share) -> int:
    """The one whose other coordinates are 0: cp ranks are a tensor-parallel group apart."""
    layout = share.place.layout
    return layout.tp * (layout.cp - 1)
