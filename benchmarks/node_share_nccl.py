"""Predicted against measured time of collectives: a slice of GLM-5.2 on two GPUs through NCCL.

`torchrun --nproc_per_node 2 -m benchmarks.node_share_nccl` trains a 10-layer slice at ep 2, with
every collective timed by CUDA events on the stream that waits for it. Then rank 0 alone trains its
share of the same layout with stand-ins, and what node_share predicts is compared.

A collective ends when its slowest rank has come, so a rank's own time is transfer plus waiting. The
last rank to come waits for nobody: the least time over ranks, call by call, is the transfer, which
is what is predicted; the rest is imbalance, shown apart. (The difference of two step times would
mix both with the noise of everything else.)
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from glm5.node_share.cut import cut_model
from glm5.node_share.measure import WARM_UP_STEPS, Share, Step, measure_share
from glm5.node_share.node import collectives, exchange_seconds, link_seconds
from glm5.node_share.training import adapt, random_model, step_taker, trained
from glm5.plan.layouts import parse_layout, place
from glm5.plan.models import read_model
from glm5.plan.workload import Workload
from glm5.runtime.distributed import default_device, ensure_distributed, shut_down
from glm5.runtime.watched import Call, register_watched, traffic_of
from glm5.train.sections import ATTENTION_TARGETS, MLP_TARGETS

WATCHED = {"cuda": "watched_nccl", "cpu": "watched_gloo"}
MIB = 2**20
# Of the plain transfers that are timed first.
SIZES_MIB = {"cuda": (1, 16, 256), "cpu": (1,)}


def share_of(options: argparse.Namespace) -> Share:
    """What each of the ranks trains."""
    _, glm5 = read_model("GLM-5.2")
    config = cut_model(glm5, layers=options.layers, narrow=options.narrow)
    ranks = int(os.environ.get("WORLD_SIZE", "2"))
    layout = parse_layout(options.layout or f"ep={ranks}")
    work = Workload(
        base_weights=options.base_weights,
        seq_len=options.tokens * layout.cp * layout.tp,
        targets=ATTENTION_TARGETS + MLP_TARGETS,
        expert_lora="shared_outer",
    )
    return Share(config, place(config, layout, ranks), 0, work, work.seq_len, options.steps)


@contextmanager
def watched_world(device: torch.device) -> Iterator[None]:
    """The world's process group, of the device's own backend, with every collective noted."""
    inners: list[Any] = []

    def make(options: Any) -> Any:
        inners.append(_inner(options, device))
        return inners[-1]

    register_watched(WATCHED[device.type], make)
    dist.init_process_group(WATCHED[device.type], timeout=timedelta(minutes=10))
    try:
        yield
    finally:
        _synchronize(device)
        dist.barrier()
        # c10d does not know of them
        for inner in inners:
            inner.shutdown()
        shut_down()


def _inner(options: Any, device: torch.device) -> Any:
    rank, size = options.group_rank, options.group_size
    if device.type == "cuda":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl.global_ranks_in_group = options.global_ranks_in_group
        nccl.group_name = options.group_id
        inner: Any = dist.ProcessGroupNCCL(options.store, rank, size, nccl)
    else:
        inner = dist.ProcessGroupGloo(options.store, rank, size, options.timeout)
    inner._set_sequence_number_for_group()
    return inner


def plain_transfers(device: torch.device) -> dict[str, dict[str, float]]:
    """Plain collectives of a few sizes: bytes over a rank's link, and median seconds."""
    found: dict[str, dict[str, float]] = {}
    for mib in SIZES_MIB[device.type]:
        whole = torch.zeros(mib * MIB // 2, dtype=torch.bfloat16, device=device)
        part = torch.zeros(len(whole) // dist.get_world_size(), dtype=whole.dtype, device=device)
        calls = {
            "all-to-all": lambda w=whole: dist.all_to_all_single(torch.empty_like(w), w),
            "all-gather": lambda w=whole, p=part: dist.all_gather_into_tensor(w, p),
            "reduce-scatter": lambda w=whole, p=part: dist.reduce_scatter_tensor(p, w),
        }
        for name, call in calls.items():
            for _ in range(8):
                call()
            _synchronize(device)
            timed = _least_over_ranks(traffic_of().take(), device)[3:]
            seconds = median(call.seconds for call in timed)
            found[f"{name} {mib} MiB"] = {"num_bytes": timed[0].num_bytes, "seconds": seconds}
    return found


def measure_real(share: Share, device: torch.device) -> tuple[list[Step], list[list[Call]]]:
    """The steps of this rank, and for each step its calls with their least times over ranks."""
    traffic = traffic_of()
    model = random_model(share.config, share.work, device)
    adapt(model, share.work)
    loop = step_taker(trained(model, share.steps), share.work, share.document_tokens, share.steps)
    traffic.take()
    steps, transfers = [], []
    for number in range(1, share.steps + 1):
        values = loop.take(number)
        _synchronize(device)
        calls = traffic.take()
        inside = sum(call.seconds for call in calls)
        steps.append(Step(values["loss"], values["step_seconds"], inside, calls))
        transfers.append(_least_over_ranks(calls, device))
    return steps, transfers


def _least_over_ranks(calls: Sequence[Call], device: torch.device) -> list[Call]:
    """Every rank makes the same calls in the same order; a call's bytes are the most of any."""
    kinds = sorted({(call.op, call.axis) for call in calls})
    rows = [(kinds.index((c.op, c.axis)), c.num_bytes, c.seconds) for c in calls]
    own = torch.tensor(rows, dtype=torch.float64, device=device)
    told = own.new_empty(dist.get_world_size() * len(own), own.shape[1])
    dist.all_gather_into_tensor(told, own)
    told = told.view(-1, *own.shape)
    _synchronize(device)
    traffic_of().take()
    assert (told[..., 0] == own[:, 0]).all(), "ranks make different calls"
    most, least = told[..., 1].amax(0).tolist(), told[..., 2].amin(0).tolist()
    return [
        Call(call.op, call.axis, int(count), seconds)
        for call, count, seconds in zip(calls, most, least, strict=True)
    ]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layout", help="such as ep=2,cp=2; by default ep over all ranks")
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--narrow", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--base-weights", choices=("dtype", "fp8"), default="fp8")
    parser.add_argument("--json", type=Path, help="also append one line to this file")
    options = parser.parse_args()
    device, share = default_device(), share_of(options)
    with watched_world(device):
        rank = dist.get_rank()
        ensure_distributed(device, share.place.layout)
        plain = plain_transfers(device)
        steps, transfers = measure_real(share, device)
    if rank:
        return
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    alone = measure_share(share, device, limit_gib=1e4)
    result = _result(plain, steps, transfers, alone.step)
    _show(result)
    if options.json:
        record = {"options": {k: str(v) for k, v in vars(options).items()}, **result}
        record |= {"device": _name(device), "torch": torch.__version__}
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _result(
    plain: dict[str, dict[str, float]], steps: list[Step], transfers: list[list[Call]], alone: Step
) -> dict[str, Any]:
    timed = range(WARM_UP_STEPS, len(steps))
    moved = [sum(call.seconds for call in transfers[step]) for step in timed]
    middle = WARM_UP_STEPS + moved.index(sorted(moved)[len(moved) // 2])
    real, least = steps[middle], transfers[middle]
    measured = sum(call.seconds for call in least)
    return {
        "plain_transfers": plain,
        "predicted_seconds": exchange_seconds(alone.calls),
        "predicted_seconds_of_real_sizes": exchange_seconds(real.calls),
        "measured_seconds": measured,
        "waiting_seconds": sum(call.seconds for call in real.calls) - measured,
        "step_seconds": real.seconds,
        "step_seconds_without_communication": real.own_seconds,
        "stand_in_step_seconds": alone.seconds,
        "stand_in_step_seconds_without_copies": alone.own_seconds,
        "measured_collectives": [asdict(kind) for kind in collectives(least)],
        "predicted_collectives": [asdict(kind) for kind in collectives(alone.calls)],
    }


def _show(result: dict[str, Any]) -> None:
    for name, plain in result["plain_transfers"].items():
        count, seconds = plain["num_bytes"], plain["seconds"]
        print(
            f"plain {name:24s}{count / seconds / 1e9:7.1f} GB/s, {seconds * 1e6:8.1f} us, "
            f"predicted {link_seconds(int(count)) * 1e6:8.1f} us"
        )
    predicted = {(k["op"], k["axis"]): k for k in result["predicted_collectives"]}
    print(
        f"\n{'collective':16s}{'ranks':10s}{'calls':>6s}{'GB':>9s}{'ms':>9s}{'predicted ms':>14s}"
    )
    for kind in result["measured_collectives"]:
        other = predicted.get((kind["op"], kind["axis"]))
        # copy_seconds is what the collective itself took
        line = f"{kind['op']:16s}{kind['axis']:10s}{kind['num_calls']:6d}"
        line += f"{kind['num_bytes'] / 1e9:9.3f}{kind['copy_seconds'] * 1e3:9.2f}"
        print(line + (f"{other['link_seconds'] * 1e3:14.2f}" if other else ""))
    measured = result["measured_seconds"]
    print(
        f"\nper step: communication {measured * 1e3:.1f} ms measured, "
        f"{result['predicted_seconds'] * 1e3:.1f} ms predicted "
        f"({result['predicted_seconds'] / measured - 1:+.1%}), "
        f"{result['waiting_seconds'] * 1e3:.1f} ms of waiting beside it"
    )
    print(
        f"step {result['step_seconds']:.3f} s, "
        f"{result['step_seconds_without_communication']:.3f} s without collectives; alone with "
        f"stand-ins {result['stand_in_step_seconds']:.3f} s, "
        f"{result['stand_in_step_seconds_without_copies']:.3f} s without their copies"
    )


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
