"""What the policy loss and the gap are made of, on two ranks and on one."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from glm5.rl.gap_meter import GapMeter
from glm5.rl.log_probs import token_log_probs
from glm5.runtime.distributed import Layout, default_device, ensure_distributed
from tests.parallel.processes import run_ranks
from tests.rl.rollouts import LENGTHS, label_columns, made_rollout

VOCAB, TEMPERATURE = 1000, 0.7


def logits_and_targets() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    logits = 10 * torch.randn(41, VOCAB, generator=generator)
    targets = torch.randint(VOCAB, (41,), generator=generator)
    targets[::5] = -1
    return logits, targets


def own_half() -> list[Tensor]:
    """Log-probabilities, entropy, and the gradient of a rank that has half of the vocabulary."""
    ensure_distributed(default_device(), Layout(tp=2))
    group = parallel_state.get_tensor_model_parallel_group()
    logits, targets = logits_and_targets()
    own = logits.chunk(2, dim=1)[dist.get_rank(group)].clone().requires_grad_()
    log_probs, entropy = token_log_probs(
        own, targets, temperature=TEMPERATURE, group=group, chunk_tokens=7
    )
    (log_probs * torch.linspace(-1, 1, len(targets))).sum().backward()
    assert own.grad is not None
    return [log_probs.detach(), entropy, own.grad]


def test_log_probs_of_a_vocabulary_on_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(tmp_path / "results", 2, own_half)
    logits, targets = logits_and_targets()
    exact = logits.double().requires_grad_()
    log_probs = torch.log_softmax(exact / TEMPERATURE, dim=1)
    entropy = -(log_probs.exp() * log_probs).sum(1)
    chosen = log_probs.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    asked = targets >= 0
    chosen, entropy = (torch.where(asked, x, 0) for x in (chosen, entropy))
    (chosen * torch.linspace(-1, 1, len(targets))).sum().backward()
    assert exact.grad is not None
    # a few roundings of the logits
    bound = 4 * torch.finfo(torch.float32).eps * float(logits.abs().max()) / TEMPERATURE
    for i, alone in enumerate((chosen.detach(), entropy.detach())):
        assert torch.equal(first[i], second[i])
        torch.testing.assert_close(first[i].double(), alone, rtol=0, atol=bound)
    whole = torch.cat([first[2], second[2]], dim=1).double()
    torch.testing.assert_close(whole, exact.grad, rtol=1e-5, atol=1e-6)


def own_gap(layout: Layout, spoil: bool) -> dict[str, Any]:
    """The gap that a rank reports; ranks of one stage share rollouts, or the tokens of all."""
    ensure_distributed(default_device(), layout)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    numbers = list(range(len(LENGTHS)))
    rollouts = {number: made_rollout(number) for number in numbers}
    meter = GapMeter()
    columns = label_columns(numbers, list(rollouts.values()))
    drawn, mask, sequences, positions = columns
    noise = torch.randn(drawn.shape, generator=torch.Generator().manual_seed(2))
    if spoil:
        noise[(sequences == 1) & (positions == 4)] = math.nan
    columns = (drawn + noise, *columns)
    if layout.cp > 1:
        meter.add(*(column.tensor_split(ranks)[rank] for column in columns))
    elif layout.pp > 1 and rank == 0:
        rollouts = {}  # the first stage has no log-probabilities
    elif layout.pp > 1:
        meter.add(*columns)
    else:
        # all but one rollout are rank 0's
        share = (sequences == 2) == (rank == 1) if ranks > 1 else torch.ones_like(mask)
        meter.add(*(column[share] for column in columns))
        kept = set(sequences[share].tolist())
        rollouts = {number: rollouts[number] for number in kept}
    meter.add_overlap("experts", torch.tensor([4, 3 + rank]))
    meter.add_overlap("experts", torch.tensor([4, 4 - rank] if ranks > 1 else [12, 11]))
    found = asdict(meter.reduce(rollouts, len(LENGTHS)))
    return found | {"sequence_abs_diff": found["sequence_abs_diff"].tolist()}


@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2), Layout(pp=2)], ids=["dp", "cp", "pp"])
def test_ranks_report_the_gap_of_one_process(tmp_path: Path, layout: Layout, spoil: bool) -> None:
    first, second = run_ranks(tmp_path / "results", 2, own_gap, layout, spoil)
    alone = own_gap(Layout(), spoil)
    assert alone["overlaps"] == {"experts": 14 / 16}
    assert alone["num_non_finite"] == int(spoil) and alone["num_tokens"] == 18
    assert alone["worst"]["request"] == ("request-1" if spoil else "request-4")
    # not == : NaN is no equal of itself
    assert repr(first) == repr(second) == repr(alone)
