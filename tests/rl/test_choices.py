"""Records of engines: what cannot be right is refused by name, the rest is packed small."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from glm5.checkpoint.tiny import tiny_config
from glm5.config import Glm5Config
from glm5.errors import ReplayError
from glm5.model.selections import DocumentSelection, LayerSelections
from glm5.rl import choices
from glm5.rl.choices import Choices, ChoiceShape, pack_experts, pack_topk
from tests.recorded import drawn_record

# Layers 0, 1, 2 and 6 select 8 keys; 3 to 6 have experts.
SHAPE = ChoiceShape.from_config(Glm5Config.from_hf_dict(tiny_config("5.2")))
Array = NDArray[np.int32]
Damage = Callable[[Array], None]


def record(length: int = 30) -> tuple[Array, Array]:
    """(experts, keys) of all layers."""
    drawn = drawn_record(length, SHAPE, seed=0)
    return drawn.experts.copy(), drawn.topk.copy()


def unpacked(packed: choices.PackedTopk, layer: int) -> Array:
    """[tokens - 1, index_topk] ascending, as a layer gets them."""
    selection = packed.layers[layer]
    ends = torch.arange(1, packed.num_tokens, dtype=torch.int32)
    layers = LayerSelections(selection.topk, (DocumentSelection(0, selection),))
    rows = layers.rows(range(len(ends)), torch.zeros_like(ends), ends)
    return np.asarray(rows.numpy())


def ascending(keys: Array) -> Array:
    ordered = np.sort(np.where(keys < 0, 2**30, keys), axis=-1)
    return np.where(ordered == 2**30, -1, ordered).astype(np.int32)


def test_the_shape_of_a_model() -> None:
    assert ChoiceShape(7, (0, 1, 2, 6), (3, 4, 5, 6), 8, 2, 8) == SHAPE


@pytest.mark.parametrize("every_layer", [True, False])
@pytest.mark.parametrize("block_bytes", [1, 70, 2**20])
def test_keys_come_back_in_order(
    monkeypatch: pytest.MonkeyPatch, every_layer: bool, block_bytes: int
) -> None:
    monkeypatch.setattr(choices, "_BLOCK_BYTES", block_bytes)
    _, topk = record()
    given = topk if every_layer else topk[:, list(SHAPE.full_layers)]
    packed = pack_topk(given, SHAPE, request="a")
    assert packed.num_tokens == 30 and packed.layers.keys() == {0, 1, 2, 6}
    for layer in SHAPE.full_layers:
        assert np.array_equal(unpacked(packed, layer), ascending(topk[:, layer]))
    assert (packed.layers[0].rows != packed.layers[1].rows).any()


@pytest.mark.parametrize("every_layer", [True, False])
def test_experts_keep_their_order(every_layer: bool) -> None:
    experts, _ = record()
    experts[:, :3] = -7  # what stands in dense layers is not read
    given = experts if every_layer else experts[:, 3:]
    packed = pack_experts(given, SHAPE, request="a")
    assert packed.num_tokens == 30 and packed.layers == (3, 4, 5, 6)
    assert packed.experts.dtype == np.uint8
    assert np.array_equal(packed.experts, experts[:, 3:].transpose(1, 0, 2))
    many = replace(SHAPE, num_experts=300)
    assert pack_experts(given, many, request="a").experts.dtype == np.uint16


@pytest.mark.parametrize("length", [1, 2, 8, 9])
def test_nothing_is_stored_where_all_keys_are_selected(length: int) -> None:
    _, topk = record(length)
    packed = pack_topk(topk, SHAPE, request="a")
    assert packed.num_tokens == length and packed.num_bytes == 0 and packed.layers == {}
    _, topk = record(10)
    assert all(len(s.rows) == 1 for s in pack_topk(topk, SHAPE, request="a").layers.values())


def test_the_smallest_form_is_taken() -> None:
    """8 keys: 16 bytes as uint16, which a bitmap of more than 128 keys exceeds."""
    for length, dtype in ((129, torch.uint8), (130, torch.uint16)):
        _, topk = record(length)
        packed = pack_topk(topk[:, [0, 1, 2, 6]], SHAPE, request="a")
        assert packed.layers[0].rows.dtype == dtype
        assert packed.layers[0].rows.shape == (length - 9, 16 if dtype == torch.uint8 else 8)
        assert np.array_equal(unpacked(packed, 2), ascending(topk[:, 2]))


def test_positions_beyond_16_bits() -> None:
    """A bitmap would have 8 KiB a row, two keys have 8 bytes."""
    shape = ChoiceShape(1, (0,), (), 2, 2, 2)
    length = 2**16 + 2
    tokens = np.arange(length - 1, dtype=np.int32)
    topk = np.stack([tokens - 1, tokens], axis=1)[:, None]
    topk[0] = [0, -1]
    rows = pack_topk(topk, shape, request="a").layers[0].rows
    assert rows.dtype == torch.int32 and rows[-1].tolist() == [2**16 - 1, 2**16]
    assert pack_topk(topk[:-1], shape, request="a").layers[0].rows.dtype == torch.uint16


def put(token: int, layer: int, *values: int) -> Damage:
    def damage(array: Array) -> None:
        array[token, layer, : len(values)] = values

    return damage


def in_layer_2(damage: Damage) -> Damage:
    """In the layers 3 to 5 as well, which share it."""

    def everywhere(array: Array) -> None:
        damage(array)
        array[:, 3:6] = array[:, 2:3]

    return everywhere


def swap_with_padding(array: Array) -> None:
    array[4, 2, [0, 5]] = array[4, 2, [5, 0]]


WRONG_KEYS = {
    "a key of the future": (put(20, 2, 21), "a key stands after its query in layer 2, token 20"),
    "a key of another request": (put(20, 2, 99), "after its query in layer 2, token 20"),
    "a negative key": (put(20, 2, -2), "a key does not exist in layer 2, token 20"),
    "padding inside": (put(20, 2, -1), "behind a place that is empty in layer 2, token 20"),
    "padding first": (swap_with_padding, "behind a place that is empty in layer 2, token 4"),
    "too few keys": (put(20, 2, 1, 2, 3, 4, 5, -1, -1, -1), "number of keys in layer 2, token 20"),
    "no keys": (put(20, 2, *[-1] * 8), "the wrong number of keys in layer 2, token 20"),
    "not all keys": (put(3, 2, 0, 1, 2, -1), "the wrong number of keys in layer 2, token 3"),
    "a key twice": (put(20, 2, 5, 5), "a key is named twice in layer 2, token 20"),
    "twice in a full row": (put(3, 2, 0, 1, 2, 2), "a key is named twice in layer 2, token 3"),
}


@pytest.mark.parametrize("kind", WRONG_KEYS)
@pytest.mark.parametrize("every_layer", [True, False])
def test_wrong_keys_are_refused(kind: str, every_layer: bool) -> None:
    damage, reason = WRONG_KEYS[kind]
    _, topk = record()
    # none of the drawn keys that stay is named again
    topk[20, 2] = np.arange(8) + 6
    in_layer_2(damage)(topk)
    given = topk if every_layer else topk[:, list(SHAPE.full_layers)]
    with pytest.raises(ReplayError, match=f"request step 3, 7: .*{reason}"):
        pack_topk(given, SHAPE, request="step 3, 7")


def test_a_fault_is_found_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "_BLOCK_BYTES", 70)
    _, topk = record()
    topk[28, 6] = [9, 1, 2, 3, 4, 5, 6, 9]
    with pytest.raises(ReplayError, match="twice in layer 6, token 28"):
        pack_topk(topk, SHAPE, request="a")


@pytest.mark.parametrize("layer", [3, 5])
def test_a_shared_layer_has_the_keys_of_its_source(layer: int) -> None:
    _, topk = record()
    topk[20, layer, 0] = topk[20, 6, 0] if topk[20, 6, 0] != topk[20, 2, 0] else -1
    with pytest.raises(ReplayError, match=rf"request a: layer {layer} shares .*layer 2(?s:.*)n 20"):
        pack_topk(topk, SHAPE, request="a")


WRONG_EXPERTS = {
    "beyond the last": (put(20, 4, 8, 1), "an expert does not exist in layer 4, token 20"),
    "none": (put(20, 4, -1, -1), "an expert does not exist in layer 4, token 20"),
    "one is missing": (put(20, 4, 3, -1), "an expert does not exist in layer 4, token 20"),
    "one twice": (put(20, 4, 3, 3), "an expert is named twice in layer 4, token 20"),
}


@pytest.mark.parametrize("kind", WRONG_EXPERTS)
@pytest.mark.parametrize("every_layer", [True, False])
def test_wrong_experts_are_refused(kind: str, every_layer: bool) -> None:
    damage, reason = WRONG_EXPERTS[kind]
    experts, _ = record()
    damage(experts)
    with pytest.raises(ReplayError, match=f"request a: {reason}"):
        pack_experts(experts if every_layer else experts[:, 3:], SHAPE, request="a")


WRONG_SHAPES: dict[str, Callable[[Array], NDArray[np.generic]]] = {
    "a layer less": lambda array: array[:, 1:],
    "a layer more": lambda array: np.repeat(array, 2, axis=1)[:, :8],
    "another width": lambda array: array[..., :1],
    "no layers": lambda array: array[:, 0],
    "64 bits": lambda array: array.astype(np.int64),
    "reals": lambda array: array.astype(np.float32),
}


@pytest.mark.parametrize("kind", WRONG_SHAPES)
def test_wrong_shapes_are_refused(kind: str) -> None:
    experts, topk = map(WRONG_SHAPES[kind], record())
    with pytest.raises(ReplayError, match=r"(?s)request a: .*wrong shape.*7 or 4, 2\] int32"):
        pack_experts(experts, SHAPE, request="a")  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match=r"(?s)request a: .*wrong shape.*7 or 4, 8\] int32"):
        pack_topk(topk, SHAPE, request="a")  # type: ignore[arg-type]


def test_both_records_are_of_the_same_tokens() -> None:
    experts, topk = record()
    packed = pack_experts(experts, SHAPE, request="a"), pack_topk(topk, SHAPE, request="a")
    assert Choices(*packed).num_tokens == Choices(None, packed[1]).num_tokens == 30
    assert Choices(None, None).num_tokens is None and Choices(None, None).num_bytes == 0
    shorter = pack_experts(experts[:-1], SHAPE, request="a")
    with pytest.raises(ReplayError, match=r"request a: .*different(?s:.*)29 tokens, keys of 30"):
        Choices(shorter, packed[1])


def test_bytes_of_a_full_request() -> None:
    """GLM-5.2 at 4,096 tokens: 32-bit positions of 21 layers are 172,032 bytes a token."""
    length, topk, num_full = 4096, 2048, 21
    shape = ChoiceShape(78, tuple(range(num_full)), tuple(range(3, 78)), 256, 8, topk)
    # one layer of its kind, as the packed size does not depend on the keys
    tokens = np.arange(length - 1, dtype=np.int32)[:, None]
    newest = np.where(tokens < topk, 0, tokens - topk + 1) + np.arange(topk, dtype=np.int32)
    record = np.where(newest <= tokens, newest, -1).astype(np.int32)[:, None]
    one = pack_topk(record, replace(shape, num_layers=1, full_layers=(0,)), request="a")
    assert np.array_equal(unpacked(one, 0), record[:, 0])
    per_token = num_full * one.num_bytes / length
    assert num_full * topk * 4 == 172_032
    assert per_token == pytest.approx(5_373, abs=1)
    assert per_token <= 172_032 / 4
    experts = np.broadcast_to(np.arange(8, dtype=np.int32), (length - 1, 75, 8))
    packed = pack_experts(experts, shape, request="a")
    assert packed.num_bytes / length == pytest.approx(600, abs=1)
    assert Choices(packed, one).num_bytes == packed.num_bytes + one.num_bytes
    assert Choices(packed, None).num_bytes == packed.num_bytes
