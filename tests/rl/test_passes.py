"""Passes through the model: the numbers of a plain forward, and gradients of the right loss."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from glm5.lora.switch import without_adapters
from glm5.model.forward import logits
from glm5.rl.batch import PolicyBatcher
from glm5.rl.choices import Choices, ChoiceShape
from glm5.rl.gap_meter import GapMeter
from glm5.rl.passes import COUNT, LOSS, Batch, Passes, Replayer, Scores
from glm5.rl.policy_loss import PolicyLoss
from glm5.rl.row import Document
from glm5.train.gradients import connect, zero_gradients
from glm5.train.state import TrainState
from glm5.train.trainable import build_state, build_trainable
from tests.recorded import drawn_record
from tests.rl.rollouts import made_rollout
from tests.rl.running import rl_config
from tests.tiny_models import TinyFolder, assert_close
from tests.training import randomise_adapters, trained

TEMPERATURE = 0.7
PLAIN = PolicyLoss()


@pytest.fixture
def state(tiny_folder: TinyFolder, tmp_path: Path) -> TrainState:
    """Adapters that are not zero, on a tiny model."""
    run = rl_config(tiny_folder("5"), tmp_path / "run")
    state = build_state(run, build_trainable(run, tiny_folder("5")))
    randomise_adapters(state.chunks[0].module)
    connect(state)
    return state


def documents() -> list[Document]:
    """Five completions; two are longer than index_topk."""
    return [Document(n, made_rollout(n), advantage=(-1.0) ** n * (n + 1)) for n in range(5)]


def passes(state: TrainState, normalise: Any = "token") -> Passes:
    return Passes(state, 64, temperature=TEMPERATURE, normalise=normalise)


def batch_of(
    state: TrainState, groups: Sequence[Sequence[Document]], max_tokens: int = 64
) -> Batch:
    batcher = PolicyBatcher(max_tokens, 0)
    shape = ChoiceShape.from_config(state.chunks[0].module.config.glm5)
    updates = [[batcher.row(mb) for mb in batcher.share(part)[0]] for part in groups]
    return Batch(updates, Replayer("none", shape, {}))


@dataclass
class Plain:
    """Log-probabilities of one document's response tokens by a forward of its own."""

    log_probs: Tensor

    @classmethod
    def of(cls, state: TrainState, document: Document) -> "Plain":
        rollout = document.rollout
        ids = torch.from_numpy(
            np.concatenate([rollout.prompt_ids, rollout.response_ids]).astype(np.int64)
        )
        out = torch.log_softmax(logits(state.chunks[0].module, ids).float() / TEMPERATURE, -1)
        first = len(rollout.prompt_ids) - 1
        return cls(out[first:-1].gather(1, ids[first + 1 :, None])[:, 0])


@torch.no_grad()
def test_scores_are_those_of_plain_forwards(state: TrainState) -> None:
    batch = batch_of(state, [documents()[:2], documents()[2:]], max_tokens=16)
    assert len(batch.rows) > 2
    meter = GapMeter()
    found = passes(state).score(batch, meter)
    for row, log_probs in zip(batch.rows, found, strict=True):
        for number in row.documents:
            expected = Plain.of(state, documents()[number]).log_probs
            assert_close(log_probs[row.sequences == number], expected, 1e-5)
        assert (log_probs[row.packed.loss_mask == 0] == 0).all()
    gap = meter.reduce({d.number: d.rollout for d in documents()}, 5)
    differences = torch.cat(
        [Plain.of(state, d).log_probs - torch.from_numpy(d.rollout.log_probs) for d in documents()]
    )
    assert gap.abs_diff == pytest.approx(float(differences.abs().mean()), rel=1e-5)
    assert gap.num_tokens == len(differences)
    # the model trains on
    assert all(module.training for module in state.chunks[0].modules())


@torch.no_grad()
def test_the_reference_has_no_adapter(state: TrainState) -> None:
    batch = batch_of(state, [documents()])
    adapted = passes(state).score(batch)
    with without_adapters(state.chunks):
        base = passes(state).score(batch)
        expected = Plain.of(state, documents()[1]).log_probs
    row = batch.rows[0]
    assert_close(base[0][row.sequences == 1], expected, 1e-5)
    assert not torch.allclose(adapted[0], base[0])


def gradients(state: TrainState) -> dict[str, Tensor]:
    """Of everything that trains, after the schedule has divided them."""
    return {name: p.main_grad.clone() for name, p in trained(state.chunks[0].module)}


def learnt(
    state: TrainState,
    batch: Batch,
    loss: PolicyLoss,
    normalise: Any = "token",
    old: Sequence[Tensor] | None = None,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    found = passes(state, normalise)
    scores = old or found.score(batch)
    reference = None
    if loss.kl_coeff:
        with without_adapters(state.chunks):
            reference = found.score(batch)
    zero_gradients(state)
    sums = found.learn(batch, 0, Scores(scores, reference), loss)
    return gradients(state), sums


@pytest.mark.parametrize("normalise", ["token", "sequence"])
def test_gradients_are_those_of_the_formula(state: TrainState, normalise: str) -> None:
    """At ratio 1: -A grad log p, a mean over tokens, or over completions of means over tokens."""
    found, sums = learnt(state, batch_of(state, [documents()], max_tokens=16), PLAIN, normalise)
    model = state.chunks[0].module
    parts = [(d, Plain.of(state, d).log_probs) for d in documents()]
    if normalise == "token":
        count = sum(len(log_probs) for _, log_probs in parts)
        loss = sum(-d.advantage * log_probs.sum() for d, log_probs in parts) / count
    else:
        count = len(parts)
        loss = sum(-d.advantage * log_probs.mean() for d, log_probs in parts) / count
    names, parameters = zip(*trained(model), strict=True)
    expected = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        assert float((found[name] - tensor).abs().max()) <= 1e-5 * largest, name
    assert sums[COUNT] == count
    assert sums["ratio"] == sums["num_tokens"]


@pytest.mark.parametrize("normalise", ["token", "sequence"])
def test_micro_batches_change_nothing(state: TrainState, normalise: str) -> None:
    loss = PolicyLoss(kl_coeff=0.3, is_high=2.0)
    one, sums = learnt(state, batch_of(state, [documents()]), loss, normalise)
    batch = batch_of(state, [documents()], max_tokens=14)
    # and a micro-batch without a completion
    rows = [*batch.updates[0], PolicyBatcher(14, 0).row([])]
    assert len(rows) > 3
    many, others = learnt(state, replace(batch, updates=[rows]), loss, normalise)
    largest = max(float(tensor.abs().max()) for tensor in one.values())
    for name, tensor in one.items():
        assert float((many[name] - tensor).abs().max()) <= 1e-5 * largest, name
    assert others == pytest.approx(sums, rel=1e-5)
    assert sums["ref_kl"] > 0 and sums[LOSS] != 0


def test_a_clipped_token_has_no_gradient(state: TrainState) -> None:
    chosen = [replace(document, advantage=1.0) for document in documents()]
    batch = batch_of(state, [chosen])
    # so much less likely before, that every ratio is above the clip
    old = [log_probs - 1 for log_probs in passes(state).score(batch)]
    found, sums = learnt(state, batch, PLAIN, old=old)
    assert sums["clip_high"] == sums["num_tokens"]
    assert all(not tensor.any() for tensor in found.values())


def test_replayed_choices_reach_every_pass(state: TrainState) -> None:
    glm5 = state.chunks[0].module.config.glm5
    shape = ChoiceShape.from_config(glm5)
    choices: dict[int, Choices | None] = {
        d.number: drawn_record(d.num_tokens, shape, seed=d.number).pack(shape) for d in documents()
    }
    batch = batch_of(state, [documents()], max_tokens=30)
    replayed = replace(batch, replayer=Replayer("both", shape, choices))
    meter = GapMeter()
    free, drawn = passes(state).score(batch), passes(state).score(replayed, meter)
    assert not torch.allclose(free[0], drawn[0])
    gap = meter.reduce({d.number: d.rollout for d in documents()}, 5)
    assert 0 < gap.overlaps["experts"] < 1 and 0 < gap.overlaps["topk"] < 1
    _, sums = learnt(state, replayed, PLAIN)
    # the same choices before and in the update
    assert sums["ratio"] == sums["num_tokens"]
    _, sums = learnt(state, replayed, PLAIN, old=free)
    assert sums["ratio"] != sums["num_tokens"]
