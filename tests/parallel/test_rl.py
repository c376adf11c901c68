"""What the policy loss and the gap are made of, on two ranks and on one."""

from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from glm5.rl.log_probs import token_log_probs
from glm5.runtime.distributed import Layout, default_device, ensure_distributed
from tests.parallel.processes import run_ranks

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
