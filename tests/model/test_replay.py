"""Replayed choices: the same bits as one's own, each taken once, in every way to run a model."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from glm5.checkpoint.load import load_model
from glm5.errors import ReplayError
from glm5.lora.attach import attach_lora
from glm5.lora.spec import LoraSpec
from glm5.lora.targets import DEFAULT_TARGETS
from glm5.model.attention import DSASelfAttention
from glm5.model.forward import finish_forward, logits, packed_documents
from glm5.model.indexer import LightningIndexer
from glm5.model.moe import Glm5Router
from glm5.model.replay import Ledger, Replay
from glm5.model.selections import LayerSelections
from tests.recorded import Recorder
from tests.tiny_models import (
    TinyFolder,
    assert_all_close,
    assert_close,
    draw_tokens,
    edges,
    gradients,
    modules_of,
    probe_loss,
)
from tests.training import randomise_adapters

if not torch.cuda.is_available():
    import tests.ops.triton_interpreter  # noqa: F401

# The tiny models select 8 keys.
LENGTHS = (21, 1, 9, 5)
TOKENS, CUT = draw_tokens(sum(LENGTHS)), edges(LENGTHS)
ALL_RECOMPUTE = ("none", "full", "selective")


def adapt(model: GPTModel) -> GPTModel:
    attach_lora(model, LoraSpec(adapter_rank=3, adapter_alpha=6, targets=DEFAULT_TARGETS), seed=0)
    randomise_adapters(model)
    return model


def train_step(model: GPTModel, **carried: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.train().zero_grad(set_to_none=True)
    out = logits(model, TOKENS, CUT, **carried)
    probe_loss(out).backward()
    return out.detach(), gradients(model)


def record(model: GPTModel) -> Recorder:
    recorder = Recorder()
    with torch.no_grad():
        logits(model.eval(), TOKENS, CUT, observer=recorder)
    return recorder


def other_choices(model: GPTModel) -> Replay:
    """Those of another token in every layer: valid, and not what the model would choose."""
    own = record(model).replay(LENGTHS)
    assert own.experts is not None and own.topk is not None
    experts = {layer: chosen.roll(1, 0) for layer, chosen in own.experts.items()}
    return Replay(experts, {layer: reversed_keys(keys) for layer, keys in own.topk.items()})


def reversed_keys(selections: LayerSelections) -> LayerSelections:
    """Every query takes the mirror image of its keys among those that it sees."""
    documents = []
    for document in selections.documents:
        keys = document.selection.rows
        last = torch.arange(len(keys), dtype=torch.int32)[:, None] + selections.index_topk
        mirrored = replace(document.selection, rows=(last - keys).flip(1))
        documents.append(document._replace(selection=mirrored))
    return replace(selections, documents=tuple(documents))


@pytest.fixture(scope="module")
def model(tiny_folder: TinyFolder) -> GPTModel:
    return load_model(tiny_folder("5.2"))


@pytest.mark.cores
@pytest.mark.parametrize("recompute", ALL_RECOMPUTE)
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("variant", ["5", "5.2"])
def test_what_was_recorded_gives_the_same_bits(
    tiny_folder: TinyFolder, variant: str, adapted: bool, recompute: str
) -> None:
    model = load_model(tiny_folder(variant), recompute=recompute)
    if adapted:
        adapt(model)
    own, own_gradients = train_step(model)
    got, got_gradients = train_step(model, replay=record(model).replay(LENGTHS))
    assert torch.equal(got, own)
    assert_all_close(got_gradients, own_gradients, limit=1e-6 if adapted else 0)


def on(backend: ModuleType, model: GPTModel) -> GPTModel:
    """By hand: a backend of GPUs is refused here, but Triton has an interpreter."""
    for _, attention in modules_of(model, DSASelfAttention):
        attention.backend = backend
    for _, indexer in modules_of(model, LightningIndexer):
        indexer.backend = backend
    return model


@pytest.mark.parametrize("name", ["peers", "triton_backend"])
def test_every_backend_replays(tiny_folder: TinyFolder, name: str) -> None:
    model = on(import_module(f"glm5.ops.{name}"), load_model(tiny_folder("5")))
    own, own_gradients = train_step(model)
    got, got_gradients = train_step(model, replay=record(model).replay(LENGTHS))
    assert torch.equal(got, own)
    # a kernel adds the gradients of keys in any order
    assert_all_close(got_gradients, own_gradients)
    replay = other_choices(model)
    other, _ = train_step(model, replay=replay)
    reference, _ = train_step(load_model(tiny_folder("5")), replay=replay)
    assert not torch.allclose(other, own, rtol=1e-3)
    assert_close(other, reference, 1e-5)


def test_to_be_seen_changes_nothing(model: GPTModel) -> None:
    own, own_gradients = train_step(model)
    recorder = Recorder()
    got, got_gradients = train_step(model, observer=recorder)
    assert torch.equal(got, own)
    assert_all_close(got_gradients, own_gradients, limit=0)
    assert recorder.experts.keys() == {3, 4, 5, 6} and recorder.topk.keys() == {0, 1, 2, 6}


@pytest.mark.parametrize("stream", ["experts", "topk"])
def test_every_entry_matters(model: GPTModel, stream: str) -> None:
    own, _ = train_step(model)
    mine, others = record(model).replay(LENGTHS), other_choices(model)
    for layer in getattr(mine, stream):
        entries = dict(getattr(mine, stream)) | {layer: getattr(others, stream)[layer]}
        got, _ = train_step(model, replay=replace(mine, **{stream: entries}))
        changed = (got != own).any(1).split(LENGTHS)
        # a document of one token has one key
        assert changed[0].any() and changed[2].any()
        if stream == "topk":
            assert not changed[1].any() and not changed[3].any() and not changed[0][:8].any()


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("adapted", [False, True])
def test_recompute_takes_the_same_choices(
    tiny_folder: TinyFolder, recompute: str, adapted: bool
) -> None:
    """Of choices that the model would not make: one of its own in the second pass would show."""
    found = []
    for how in ("none", recompute):
        model = load_model(tiny_folder("5.2"), recompute=how)
        if adapted:
            adapt(model)
        found.append(train_step(model, replay=other_choices(model)))
    assert torch.equal(found[1][0], found[0][0])
    assert_all_close(found[1][1], found[0][1], limit=1e-6 if adapted else 0)


@pytest.mark.parametrize("recompute", ALL_RECOMPUTE)
def test_two_micro_batches_in_flight_keep_their_own(
    tiny_folder: TinyFolder, recompute: str
) -> None:
    """F1 F2 B1 B2, each with other choices."""
    model = load_model(tiny_folder("5.2"), recompute=recompute)
    replays = [record(model).replay(LENGTHS), other_choices(model)]
    apart = [train_step(model, replay=one)[1] for one in replays]
    model.train().zero_grad(set_to_none=True)
    losses = [probe_loss(logits(model, TOKENS, CUT, replay=one)) for one in replays]
    for loss in losses:
        loss.backward()
    together = gradients(model)
    expected = {name: apart[0][name] + apart[1][name] for name in together}
    assert_all_close(together, expected, limit=1e-5)


@pytest.mark.parametrize("recompute", ALL_RECOMPUTE)
def test_a_forward_takes_each_entry_once(
    tiny_folder: TinyFolder, monkeypatch: pytest.MonkeyPatch, recompute: str
) -> None:
    model = load_model(tiny_folder("5.2"), recompute=recompute)
    replay = record(model).replay(LENGTHS)
    taken: list[tuple[str, int, bool]] = []
    take = Ledger.take

    def noted(ledger: Ledger, stream: Any, layer: int) -> None:
        taken.append((stream, layer, ledger.finished))
        take(ledger, stream, layer)

    monkeypatch.setattr(Ledger, "take", noted)
    train_step(model, replay=replay)
    first = [entry[:2] for entry in taken if not entry[2]]
    again = [entry[:2] for entry in taken if entry[2]]
    assert sorted(first) == sorted(replay.entries()) and len(first) == 8
    recomputed = {"none": (), "full": ("experts", "topk"), "selective": ("experts",)}[recompute]
    assert sorted(again) == sorted(entry for entry in first if entry[0] in recomputed)


@pytest.mark.parametrize(("stream", "layer"), [("experts", 4), ("topk", 2)])
def test_a_missing_entry_is_refused(model: GPTModel, stream: str, layer: int) -> None:
    replay = record(model).replay(LENGTHS)
    some = {n: entry for n, entry in getattr(replay, stream).items() if n != layer}
    with pytest.raises(ReplayError, match=f"no {stream} to replay in layer {layer}"):
        logits(model, TOKENS, CUT, replay=replace(replay, **{stream: some}))


@pytest.mark.parametrize(("stream", "layer"), [("experts", 0), ("topk", 3)])
def test_an_entry_that_is_left_over_is_refused(model: GPTModel, stream: str, layer: int) -> None:
    """A dense layer has no router, a shared one no indexer."""
    replay = record(model).replay(LENGTHS)
    entries = getattr(replay, stream)
    more = dict(entries) | {layer: next(iter(entries.values()))}
    with pytest.raises(ReplayError, match=f"(?s)unused.*{stream} of layer {layer}"):
        logits(model, TOKENS, CUT, replay=replace(replay, **{stream: more}))


def run(model: GPTModel, documents: Any) -> Tensor:
    positions = torch.arange(len(TOKENS))[None]
    return model(TOKENS[None], positions, attention_mask=None, packed_seq_params=documents)


def test_packed_documents_are_of_one_forward(model: GPTModel) -> None:
    documents = packed_documents(CUT, TOKENS.device, replay=record(model).replay(LENGTHS))
    run(model, documents)
    with pytest.raises(ReplayError, match="layer 0 takes its topk twice in one forward"):
        run(model, documents)
    finish_forward(model, documents)
    with pytest.raises(ReplayError, match="finished twice"):
        finish_forward(model, documents)


def test_nothing_is_recomputed_without_a_forward() -> None:
    ledger = Ledger()
    ledger.finish([])
    with pytest.raises(ReplayError, match="layer 3 takes its experts without a forward"):
        ledger.take("experts", 3)


def test_the_model_keeps_nothing_of_a_replay(model: GPTModel) -> None:
    own, _ = train_step(model)
    train_step(model, replay=other_choices(model))
    assert torch.equal(train_step(model)[0], own)


@pytest.fixture
def forbidden(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """forbidden(name): a method of the indexer that must not be called."""

    def forbid(name: str) -> None:
        def called(*_: Any) -> None:
            raise AssertionError(f"{name} was called")

        monkeypatch.setattr(LightningIndexer, name, called)

    return forbid


@pytest.mark.parametrize("trains", [False, True])
def test_an_indexer_that_does_not_learn_computes_nothing(
    model: GPTModel, forbidden: Callable[[str], None], trains: bool
) -> None:
    replay = record(model).replay(LENGTHS)
    forbidden("project")
    logits(model.train(trains), TOKENS, CUT, replay=replay)
    with pytest.raises(AssertionError, match="project was called"):
        logits(model, TOKENS, CUT, replay=replace(replay, topk=None))


@pytest.mark.parametrize("recompute", ALL_RECOMPUTE)
def test_an_indexer_learns_from_the_replayed_keys(
    tiny_folder: TinyFolder, forbidden: Callable[[str], None], recompute: str
) -> None:
    model = load_model(tiny_folder("5.2"), indexer_loss_coeff=0.5, recompute=recompute)
    _, expected = train_step(model)
    own, others = record(model).replay(LENGTHS), other_choices(model)
    forbidden("select")
    _, got = train_step(model, replay=own)
    # its own keys of short documents, too: they attend over a selection where the indexer learns
    assert_all_close(got, expected, limit=0)
    _, different = train_step(model, replay=others)
    of_indexers = [name for name in expected if ".indexer." in name]
    assert len(of_indexers) == 4 * 5
    assert all(different[name].any() for name in of_indexers)
    assert not any(torch.equal(different[name], got[name]) for name in of_indexers)


def test_a_pack_of_short_documents_takes_its_entries_too(model: GPTModel) -> None:
    """They attend densely, and nothing is left over."""
    lengths = (5, 8, 1)
    tokens, cut = draw_tokens(14), edges(lengths)
    recorder = Recorder()
    own = logits(model, tokens, cut, observer=recorder)
    assert recorder.topk == {}
    nothing = {layer: LayerSelections(8, ()) for layer in (0, 1, 2, 6)}
    got = logits(model, tokens, cut, replay=Replay(recorder.experts, nothing))
    assert torch.equal(got, own)


def test_documents_that_must_attend_sparsely_need_no_record(tiny_folder: TinyFolder) -> None:
    """deterministic_attention takes every query over a selection."""
    model = load_model(tiny_folder("5.2"), deterministic_attention=True)
    own, _ = train_step(model)
    replay = record(model).replay(LENGTHS)
    assert replay.topk is not None
    assert all(len(keys.documents) == 2 for keys in replay.topk.values())
    assert torch.equal(train_step(model, replay=replay)[0], own)


def test_an_mtp_layer_chooses_for_itself(tiny_folder: TinyFolder) -> None:
    model = load_model(tiny_folder("5.2"), include_mtp=True).train()
    recorder, results = Recorder(), []

    def step(**carried: Any) -> None:
        model.zero_grad(set_to_none=True)
        documents = packed_documents(CUT, TOKENS.device, **carried)
        losses = model(
            TOKENS[None],
            torch.arange(len(TOKENS))[None],
            attention_mask=None,
            labels=TOKENS[None],
            loss_mask=torch.ones(1, len(TOKENS)),
            packed_seq_params=documents,
        )
        finish_forward(model, documents)
        losses.sum().backward()
        results.append((losses.detach(), gradients(model)))

    step(observer=recorder)
    assert max(recorder.experts) == 6 and max(recorder.topk) == 6
    step(replay=recorder.replay(LENGTHS))
    assert torch.equal(results[0][0], results[1][0])
    assert_all_close(results[1][1], results[0][1], limit=0)
    assert any(name.startswith("mtp.") for name in results[0][1])


@pytest.fixture
def seen_routers(model: GPTModel) -> Iterator[dict[int, tuple[Tensor, Tensor, Tensor]]]:
    """(input, weights, map) of every router of the next forward, by layer."""
    seen: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def noted(module: Glm5Router, args: Any, kwargs: Any, out: Any) -> None:
        seen[module.layer_number - 1] = (args[0].detach(), *out)

    handles = [
        router.register_forward_hook(noted, with_kwargs=True)
        for _, router in modules_of(model, Glm5Router)
    ]
    yield seen
    for handle in handles:
        handle.remove()


def test_weights_come_from_the_trainers_logits(
    model: GPTModel, seen_routers: dict[int, tuple[Tensor, Tensor, Tensor]]
) -> None:
    """sigmoid at the replayed experts without the bias, divided by its sum, times the scale."""
    replay = other_choices(model)
    assert replay.experts is not None
    _, grads = train_step(model, replay=replay)
    for name, router in modules_of(model, Glm5Router):
        x, weights, routing_map = seen_routers[router.layer_number - 1]
        chosen = replay.experts[router.layer_number - 1]
        scores = (x[:, 0] @ router.weight.detach().T).sigmoid().gather(1, chosen)
        scale = model.config.glm5.routed_scaling_factor
        expected = scale * scores / scores.sum(1, keepdim=True)
        assert_close(weights.detach().gather(1, chosen), expected)
        assert (routing_map.sum(1) == chosen.shape[1]).all() and routing_map.gather(1, chosen).all()
        assert router.expert_bias.any()
        assert grads[f"{name}.weight"].any()


def test_a_token_without_a_record_chooses_itself(
    model: GPTModel, seen_routers: dict[int, tuple[Tensor, Tensor, Tensor]]
) -> None:
    last = CUT[1:] - 1
    own = record(model)
    first = seen_routers[3]
    experts = {layer: chosen.roll(1, 0) for layer, chosen in own.experts.items()}
    for chosen in experts.values():
        chosen[last] = -1
    logits(model, TOKENS, CUT, replay=Replay(experts))
    # the first router's input is the same, and so is what it chooses
    assert torch.equal(seen_routers[3][2][last], first[2][last])
    assert not torch.equal(seen_routers[3][2], first[2])
    nothing = {layer: torch.full_like(chosen, -1) for layer, chosen in experts.items()}
    plain = logits(model, TOKENS, CUT)
    assert torch.equal(logits(model, TOKENS, CUT, replay=Replay(nothing)), plain)


def test_one_stream_is_replayed_without_the_other(model: GPTModel) -> None:
    own, others = record(model).replay(LENGTHS), other_choices(model)
    plain = logits(model.eval(), TOKENS, CUT)
    for stream in ("experts", "topk"):
        alone = Replay(**{stream: getattr(own, stream)})
        assert torch.equal(logits(model, TOKENS, CUT, replay=alone), plain)
        alone = Replay(**{stream: getattr(others, stream)})
        assert not torch.equal(logits(model, TOKENS, CUT, replay=alone), plain)


def test_layers_that_share_use_what_was_replayed_above(model: GPTModel) -> None:
    handed: dict[int, Tensor] = {}
    handles = [
        attention.register_forward_hook(
            lambda module, args, out: handed.update({module.layer_number - 1: out[1]})
        )
        for _, attention in modules_of(model, DSASelfAttention)
    ]
    replay = other_choices(model)
    assert replay.topk is not None
    logits(model, TOKENS, CUT, replay=replay)
    for handle in handles:
        handle.remove()
    keys = replay.topk[2].documents[0].selection.rows
    assert torch.equal(handed[2][8:21], keys)
    assert all(torch.equal(handed[layer], handed[2]) for layer in (3, 4, 5))
    assert not torch.equal(handed[6], handed[2])


def test_an_observer_of_a_replay_sees_what_the_layers_would_choose(model: GPTModel) -> None:
    own, others = record(model), other_choices(model)
    recorder = Recorder()
    expected = logits(model, TOKENS, CUT, replay=others)
    assert torch.equal(logits(model, TOKENS, CUT, replay=others, observer=recorder), expected)
    # the first layer's input is the same, those below have seen other choices
    assert torch.equal(recorder.topk[0], own.topk[0])
    assert not torch.equal(recorder.topk[6], own.topk[6])
    assert not torch.equal(recorder.experts[6], own.experts[6])


@pytest.mark.parametrize("replays", [False, True])
@pytest.mark.parametrize("recompute", ALL_RECOMPUTE)
def test_what_is_recomputed_is_not_seen_again(
    tiny_folder: TinyFolder, recompute: str, replays: bool
) -> None:
    """A recorder would refuse it."""
    model, recorder = load_model(tiny_folder("5.2"), recompute=recompute), Recorder()
    replay = other_choices(model) if replays else None
    _, seen = train_step(model, replay=replay, observer=recorder)
    assert len(recorder.experts) == len(recorder.topk) == 4
    assert_all_close(seen, train_step(model, replay=replay)[1], limit=0)
