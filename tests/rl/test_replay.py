"""Records of rollouts in a packed micro-batch, and how many of them the trainer agrees with."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel

from glm5.checkpoint.load import load_model
from glm5.errors import ReplayError
from glm5.model.forward import logits
from glm5.model.replay import Replay
from glm5.rl.choices import Choices, ChoiceShape
from glm5.rl.overlap import Overlap
from glm5.rl.recorded import Recorded
from glm5.rl.replay import build_replay
from tests.recorded import Recorder, drawn_record
from tests.tiny_models import (
    TinyFolder,
    assert_all_close,
    assert_close,
    draw_tokens,
    edges,
    gradients,
    probe_loss,
    tiny_folder,
)

__all__ = ["tiny_folder"]

# The tiny models select 8 keys. The last three are padding.
LENGTHS = (21, 5, 9, 17)
WHOLE = (*LENGTHS, 1, 1, 1)
TOKENS, CUT = draw_tokens(sum(WHOLE)), edges(WHOLE)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tiny_folder: TinyFolder) -> GPTModel:
    return load_model(tiny_folder("5.2"))


@pytest.fixture(scope="module")
def shape(model: GPTModel) -> ChoiceShape:
    return ChoiceShape.from_config(model.config.glm5)


def drawn(shape: ChoiceShape) -> list[Choices | None]:
    return [drawn_record(length, shape, seed=1).pack(shape) for length in LENGTHS]


def own(model: GPTModel) -> list[Choices | None]:
    """What the model itself chooses, by way of an engine's records."""
    recorder = Recorder()
    with torch.no_grad():
        logits(model.eval(), TOKENS, CUT, observer=recorder)
    records = recorder.records(WHOLE, model.config.glm5)[: len(LENGTHS)]
    return [record.pack(ChoiceShape.from_config(model.config.glm5)) for record in records]


def built(documents: list[Choices | None], shape: ChoiceShape, recorded: Recorded) -> Replay:
    return build_replay(documents, LENGTHS, recorded, shape, CPU, sum(WHOLE))


def test_ones_own_records_give_ones_own_numbers(model: GPTModel, shape: ChoiceShape) -> None:
    """But for the last tokens, which have no record, and which no loss sees."""
    trained = torch.ones(len(TOKENS), 1)
    trained[CUT[1:] - 1] = 0
    found = []
    for replay in (None, built(own(model), shape, "both")):
        model.train().zero_grad(set_to_none=True)
        out = logits(model, TOKENS, CUT, replay=replay)
        probe_loss(out * trained).backward()
        found.append((out.detach() * trained, gradients(model)))
    assert_close(found[1][0], found[0][0])
    assert_all_close(found[1][1], found[0][1], limit=1e-5)


@pytest.mark.parametrize("recorded", ["none", "routing", "indexer", "both"])
def test_what_is_recorded_is_replayed(
    model: GPTModel, shape: ChoiceShape, recorded: Recorded
) -> None:
    replay = built(drawn(shape), shape, recorded)
    assert (replay.experts is not None) == (recorded in ("routing", "both"))
    assert (replay.topk is not None) == (recorded in ("indexer", "both"))
    out = logits(model, TOKENS, CUT, replay=replay)
    assert out.isfinite().all()
    assert torch.equal(out, logits(model, TOKENS, CUT)) == (recorded == "none")


def test_rows_of_experts(shape: ChoiceShape) -> None:
    replay = built(drawn(shape), shape, "routing")
    assert replay.experts is not None and replay.experts.keys() == {3, 4, 5, 6}
    start = 0
    for length in LENGTHS:
        record = drawn_record(length, shape, seed=1).experts
        for layer, experts in replay.experts.items():
            assert experts.shape == (sum(WHOLE), 2)
            rows = experts[start : start + length]
            assert np.array_equal(rows[:-1].numpy(), record[:, layer])
            assert (rows[-1] == -1).all()
        start += length
    assert (replay.experts[3][start:] == -1).all()
    many = [drawn_record(9, replace(shape, num_experts=40_000), seed=1)]
    wide = replace(shape, num_experts=40_000)
    packed = [record.pack(wide) for record in many]
    experts = build_replay(packed, [9], "routing", wide, CPU, 9).experts
    assert experts is not None
    assert np.array_equal(experts[4][:-1].numpy(), many[0].experts[:, 4])


def test_short_documents_need_no_keys(shape: ChoiceShape) -> None:
    replay = built(drawn(shape), shape, "indexer")
    assert replay.topk is not None and replay.topk.keys() == {0, 1, 2, 6}
    for layer in replay.topk.values():
        # nine tokens have eight queries with a record, and those select all keys
        assert [document.start for document in layer.documents] == [0, 35]
        assert [len(document.selection.rows) for document in layer.documents] == [12, 8]


def test_keys_are_not_copied(shape: ChoiceShape) -> None:
    documents = drawn(shape)
    assert documents[0] is not None and documents[0].topk is not None
    replay = built(documents, shape, "indexer")
    assert replay.topk is not None
    rows = replay.topk[2].documents[0].selection.rows
    assert rows.data_ptr() == documents[0].topk.layers[2].rows.data_ptr()


@pytest.mark.parametrize("recorded", ["routing", "indexer", "both"])
def test_a_document_without_a_record_is_refused(shape: ChoiceShape, recorded: Recorded) -> None:
    for missing in (None, Choices(None, None)):
        documents = drawn(shape)
        documents[2] = missing
        with pytest.raises(ReplayError, match="document 2 of a micro-batch has no record"):
            built(documents, shape, recorded)
    assert built([None] * 4, shape, "none") == Replay()


@pytest.mark.parametrize("recorded", ["routing", "indexer"])
def test_a_record_of_other_tokens_is_refused(shape: ChoiceShape, recorded: Recorded) -> None:
    documents = drawn(shape)
    documents[3] = drawn_record(16, shape, seed=1).pack(shape, request="group 1, 4")
    with pytest.raises(ReplayError, match=r"(?s)request group 1, 4: .*16 tokens.*17 tokens"):
        built(documents, shape, recorded)


def test_padding_alone_needs_nothing(model: GPTModel, shape: ChoiceShape) -> None:
    replay = build_replay([None] * 3, [1] * 3, "both", shape, CPU, 3)
    tokens, cut = draw_tokens(3), edges([1, 1, 1])
    assert torch.equal(logits(model, tokens, cut, replay=replay), logits(model, tokens, cut))


def shares(model: GPTModel, documents: list[Choices | None], *, replays: bool) -> list[float]:
    """The shares of experts and keys, by observing a forward with or without the replay."""
    recorded = built(documents, ChoiceShape.from_config(model.config.glm5), "both")
    overlap = Overlap(recorded, CPU)
    with torch.no_grad():
        replay = recorded if replays else None
        logits(model.eval(), TOKENS, CUT, replay=replay, observer=overlap)
    counts = [overlap.counts["experts"].tolist(), overlap.counts["topk"].tolist()]
    # 48 queries have experts in four layers, 20 select keys in four
    assert [recorded for recorded, _ in counts] == [48 * 4 * 2, 20 * 4 * 8]
    return [same / recorded for recorded, same in counts]


def test_ones_own_choices_overlap_fully(model: GPTModel) -> None:
    documents = own(model)
    assert shares(model, documents, replays=True) == [1.0, 1.0]
    assert shares(model, documents, replays=False) == [1.0, 1.0]


@pytest.mark.parametrize("replays", [True, False])
def test_overlap_counts_common_choices(model: GPTModel, shape: ChoiceShape, replays: bool) -> None:
    """One by one, in sets."""
    documents, recorder = drawn(shape), Recorder()
    replay = built(documents, shape, "both")
    with torch.no_grad():
        logits(model.eval(), TOKENS, CUT, replay=replay if replays else None, observer=recorder)
    seen = recorder.records(WHOLE, model.config.glm5)
    same = {"experts": 0, "topk": 0}
    for length, mine in zip(LENGTHS, seen, strict=False):
        record = drawn_record(length, shape, seed=1)
        for token in range(length - 1):
            for layer in shape.moe_layers:
                pair = mine.experts[token, layer], record.experts[token, layer]
                same["experts"] += len(set(pair[0]) & set(pair[1]))
            for layer in shape.full_layers if token >= 8 else ():
                pair = mine.topk[token, layer], record.topk[token, layer]
                same["topk"] += len(set(pair[0]) & set(pair[1]))
    expected = [same["experts"] / (48 * 4 * 2), same["topk"] / (20 * 4 * 8)]
    assert 0.1 < expected[0] < 0.5 and 0.3 < expected[1] < 0.9
    assert shares(model, documents, replays=replays) == pytest.approx(expected)


def test_overlap_of_nothing_counts_nothing(model: GPTModel, shape: ChoiceShape) -> None:
    overlap = Overlap(built(drawn(shape), shape, "none"), CPU)
    logits(model, TOKENS, CUT, observer=overlap)
    assert [counts.tolist() for counts in overlap.counts.values()] == [[0, 0]] * 2
