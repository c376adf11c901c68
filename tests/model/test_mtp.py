"""What MTP looks at, and the loss that it adds, against the same written out."""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from glm5.checkpoint.load import load_model
from glm5.model import mtp
from glm5.model.forward import packed_documents
from glm5.model.mtp import Glm5Model, next_in_document
from glm5.runtime.distributed import ensure_distributed
from tests.tiny_models import TinyFolder, assert_all_close, draw_tokens, edges, gradients

LENGTHS = (7, 1, 12, 2)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ((5,), [2, 3, 4, 5, 0]),
        ((3, 2), [2, 3, 0, 5, 0]),
        ((1, 0, 3, 1), [0, 3, 4, 0, 0]),
        # bshd: every sequence is a document
        (None, [2, 3, 4, 5, 0]),
    ],
)
def test_what_stands_one_token_later(lengths: tuple[int, ...] | None, expected: list[int]) -> None:
    ensure_distributed(torch.device("cpu"))
    x = torch.arange(1, 6)[None]
    packed = None if lengths is None else packed_documents(edges(lengths), x.device)
    assert next_in_document(x, packed)[0].tolist() == expected
    assert next_in_document(x.float(), packed)[0].tolist() == expected
    if lengths is None:
        both = next_in_document(torch.cat([x, x + 5]), packed)
        assert both.tolist() == [expected, [7, 8, 9, 10, 0]]


def test_a_rank_does_not_keep_the_states_of_all_tokens(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny_folder("5"), include_mtp=True, dtype="float32").train()
    monkeypatch.setattr(model.config, "sequence_parallel", True)
    whole: list[Tensor] = []
    kept: set[int] = set()

    def own_part(x: Tensor) -> Tensor:
        whole.append(torch.cat([x, x]))
        return whole[0][: len(x)]

    def keep(x: Tensor) -> Tensor:
        kept.add(x.untyped_storage().data_ptr())
        return x

    monkeypatch.setattr(mtp, "scatter_to_sequence_parallel_region", own_part)
    states = torch.randn(5, 1, model.config.hidden_size)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.mtp.layers[0]._predict(None, states, states)
    assert kept and whole[0].data_ptr() not in kept


def run(model: Glm5Model, row: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(losses [1, t], MTP logits [t, vocab])."""
    seen: list[Tensor] = []
    handle = model.mtp.layers[0].register_forward_hook(lambda _, args, out: seen.append(out[0]))
    losses = model(
        input_ids=row["tokens"][None],
        position_ids=None,
        attention_mask=None,
        labels=row["labels"][None],
        loss_mask=row["mask"][None],
        packed_seq_params=packed_documents(edges(LENGTHS), torch.device("cpu")),
    )
    handle.remove()
    return losses, model.output_layer(seen[0])[0][:, 0]


def test_the_loss_counts_documents_with_two_tokens_ahead(tiny_folder: TinyFolder) -> None:
    """Gradients of main + 0.1 n_0 / n_1 sum(mask_1 CE_1); labels stand one ahead already."""
    model = load_model(tiny_folder("5"), include_mtp=True, dtype="float32").train()
    MTPLossAutoScaler.set_loss_scale(torch.ones(1))
    tokens, mask = draw_tokens(sum(LENGTHS)), draw_tokens(sum(LENGTHS), high=2, seed=1).float()
    mask[edges(LENGTHS)[1:] - 1] = 0
    row = {"tokens": tokens, "labels": tokens.roll(-1), "mask": mask}

    losses, _ = run(model, row)
    (losses[0] * mask).sum().backward()
    got = gradients(model)

    model.zero_grad()
    model.mtp.train()
    # in evaluation the loss is not added
    model.training = False
    losses, predicted = run(model, row)
    # documents of less than three tokens have nothing two ahead
    ahead = [i for start in (0, 8) for i in range(start, start + {0: 5, 8: 10}[start])]
    counted = [i for i in ahead if mask[i + 1]]
    assert 0 < len(counted) < int(mask.sum())
    extra = F.cross_entropy(predicted[counted].float(), tokens[[i + 2 for i in counted]])
    ((losses[0] * mask).sum() + 0.1 * mask.sum() * extra).backward()
    assert_all_close(got, gradients(model), 1e-5, floor=1e-3)
    assert any(name.startswith("mtp.") and tensor.any() for name, tensor in got.items())
