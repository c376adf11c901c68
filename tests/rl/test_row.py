"""Completions end to end: what stands at which token."""

import numpy as np
import torch

from glm5.rl.row import NO_SEQUENCE, Document, policy_row
from tests.rl.rollouts import label_columns, made_rollout

PAD = 7


def documents(*numbers: int) -> list[Document]:
    return [Document(n, made_rollout(n), advantage=n + 0.5) for n in numbers]


def test_every_label_knows_its_completion() -> None:
    chosen = documents(2, 0, 3)
    row = policy_row(chosen, None, PAD)
    rollout_log_probs, mask, sequences, positions = label_columns(
        [document.number for document in chosen], [document.rollout for document in chosen]
    )
    assert torch.equal(row.packed.loss_mask > 0, mask)
    assert torch.equal(row.rollout_log_probs[mask], rollout_log_probs[mask])
    assert torch.equal(row.sequences[mask], sequences[mask])
    assert torch.equal(row.positions[mask], positions[mask])
    assert torch.equal(row.advantages[mask], sequences[mask] + 0.5)
    assert (row.sequences[~mask] == NO_SEQUENCE).all()
    assert row.documents == (2, 0, 3)
    # the label is the response token of that position
    ids = {d.number: np.concatenate([d.rollout.prompt_ids, d.rollout.response_ids]) for d in chosen}
    for label, number, position in zip(
        row.packed.labels[mask], row.sequences[mask], row.positions[mask], strict=True
    ):
        assert label == ids[int(number)][int(position)]


def test_padding_is_behind_and_learns_nothing() -> None:
    row = policy_row(documents(0, 1), None, PAD)
    padded = policy_row(documents(0, 1), 40, PAD)
    size = row.packed.num_tokens
    assert padded.packed.num_tokens == 40 and padded.documents == row.documents
    for name in ("advantages", "rollout_log_probs", "sequences", "positions"):
        assert torch.equal(getattr(padded, name)[:size], getattr(row, name))
        assert len(getattr(padded, name)) == 40
    assert (padded.packed.input_ids[size:] == PAD).all()
    assert padded.packed.loss_mask[size:].sum() == 0
    assert (padded.packed.cu_seqlens.diff()[2:] == 1).all()


def test_without_completions_there_is_something_to_compute() -> None:
    for length, expected in ((None, 1), (5, 5)):
        row = policy_row([], length, PAD)
        assert row.packed.num_tokens == expected == len(row.advantages)
        assert row.packed.loss_mask.sum() == 0 and row.documents == ()
