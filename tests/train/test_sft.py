"""The loss of a micro-batch: a sum over the assistant's tokens, and how many there were."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.load import build_for, load_model
from glm5.checkpoint.tiny import tiny_config
from glm5.config import Glm5Config
from glm5.model.forward import logits
from glm5.train.packing import PackedRow
from glm5.train.sft import forward_step, reduce_loss
from tests.tiny_models import TinyFolder, assert_close, draw_tokens, edges


def test_the_sum_runs_over_masked_tokens_in_fp32() -> None:
    losses = torch.tensor([[1.0, 2.0, 4.0, 8.0]], dtype=torch.bfloat16, requires_grad=True)
    loss_sum, num_tokens, report = reduce_loss(torch.tensor([0.0, 1.0, 0.0, 1.0]), losses)
    assert loss_sum.item() == 10.0 and loss_sum.dtype == torch.float32
    assert num_tokens.item() == 2 and num_tokens.dtype == torch.int
    assert report["loss_sum"].item() == 10.0 and not report["loss_sum"].requires_grad
    loss_sum.backward()
    assert losses.grad is not None and losses.grad.tolist() == [[0.0, 1.0, 0.0, 1.0]]


def test_no_trained_token_gives_no_loss() -> None:
    loss_sum, num_tokens, _ = reduce_loss(torch.zeros(3), torch.ones(1, 3))
    assert (loss_sum.item(), num_tokens.item()) == (0.0, 0)


@pytest.mark.parametrize("lengths", [[1], [9], [5, 1, 12]])
def test_losses_are_those_of_the_documents_alone(
    tiny_folder: TinyFolder, lengths: list[int]
) -> None:
    model = load_model(tiny_folder("5"), dtype="float32")
    count = sum(lengths)
    tokens, labels = draw_tokens(count), draw_tokens(count, seed=1)
    mask = (draw_tokens(count, high=2, seed=2) == 1).float()
    row = PackedRow(tokens, labels, mask, edges(lengths).int())
    with torch.no_grad():
        losses, reduce = forward_step(iter([row]), model)
        expected = [
            F.cross_entropy(logits(model, part).float(), target, reduction="none")
            for part, target in zip(tokens.split(lengths), labels.split(lengths), strict=True)
        ]
    assert_close(losses[0], torch.cat(expected), limit=1e-5)
    loss_sum, num_tokens, _ = reduce(losses)
    assert num_tokens.item() == mask.sum().item()
    assert_close(loss_sum, (torch.cat(expected) * mask).sum(), limit=1e-5)


@pytest.mark.parametrize("counts", [(1, 2, 1), (2, 1)], ids=str)
def test_models_of_any_number_of_mtp_layers_train_in_one_process(counts: tuple[int, ...]) -> None:
    """Megatron reports MTP losses in one list per process, as long as its first model needs."""
    tokens = draw_tokens(12)
    row = PackedRow(tokens, tokens.roll(-1), torch.ones(12), edges([12]).int())
    models = {count: mtp_model(count) for count in set(counts)}
    for count in counts:
        losses, _ = forward_step(iter([row]), models[count])
        losses.sum().backward()
        for parameter in models[count].mtp.layers[count - 1].eh_proj.parameters():
            assert parameter.grad is not None and parameter.grad.abs().sum() > 0


def mtp_model(count: int) -> GPTModel:
    raw = tiny_config("5") | {"num_nextn_predict_layers": count}
    (model,) = build_for(Glm5Config.from_hf_dict(raw), dtype="float32", include_mtp=True)
    generator = torch.Generator().manual_seed(count)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.train()
