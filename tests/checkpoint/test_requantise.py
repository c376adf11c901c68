"""FP8 folders rewritten: untouched blocks bit for bit, the others by the published formula."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.fp8 import SCALE_SUFFIX
from glm5.checkpoint.requantise import Weight, add_to_blocks, rewrite_as_fp8
from glm5.checkpoint.safetensors_index import INDEX_FILE
from glm5.config import Glm5Config
from glm5.errors import CheckpointError
from glm5.ops.block_scaled import FP8_DTYPE, BlockScaled, quantise
from tests.exported import SMALL_FILES, tensors_of
from tests.hf_folders import rewrite
from tests.tiny_models import TinyFolder

# kv_a_proj_with_mqa's rows, and columns whose last block is ragged, too
SHAPE, GRID = (576, 300), (5, 3)


def drawn() -> BlockScaled:
    """With scales that quantising its values again would not give."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(FP8_DTYPE)
    scales = 0.5 + torch.rand(GRID, generator=torch.Generator().manual_seed(1))
    return BlockScaled(values, scales)


def by_the_formula(block: Tensor) -> tuple[Tensor, Tensor]:
    """Of one block: values, and scale [1, 1]."""
    scale = block.abs().max() / 448
    return (block / scale).to(FP8_DTYPE), scale.view(1, 1)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def same_folder(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def test_nothing_added_changes_no_bit() -> None:
    weight = drawn()
    again = quantise(weight.dequantise(torch.float32))
    assert not same(again.scales, weight.scales)
    # a product with -1 may leave zeros of that sign
    for zeros in (torch.zeros(SHAPE), -torch.zeros(SHAPE)):
        got = add_to_blocks(weight, zeros)
        assert same(got.values, weight.values) and same(got.scales, weight.scales)


@pytest.mark.parametrize("place", [(0, 0), (130, 127), (511, 256), (512, 128), (575, 299)])
def test_only_the_block_of_a_change_is_quantised_anew(place: tuple[int, int]) -> None:
    weight, delta = drawn(), torch.zeros(SHAPE)
    delta[place] = 3000.0
    got = add_to_blocks(weight, delta)
    row, column = place[0] // 128, place[1] // 128
    for i in range(GRID[0]):
        for j in range(GRID[1]):
            part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            values, scales = weight.values[part], weight.scales[i : i + 1, j : j + 1]
            if (i, j) == (row, column):
                summed = values.float() * scales + delta[part]
                values, scales = by_the_formula(summed)
                assert not same(
                    got.scales[i : i + 1, j : j + 1], weight.scales[i : i + 1, j : j + 1]
                )
            assert torch.equal(bits(got.values[part].clone()), bits(values.clone())), (i, j)
            assert torch.equal(got.scales[i : i + 1, j : j + 1], scales), (i, j)


def test_a_smaller_block() -> None:
    weight = quantise(torch.randn(10, 11), (4, 3))
    delta = torch.zeros(10, 11)
    delta[9, 10] = 1.0
    got = add_to_blocks(weight, delta)
    changed = got.scales != weight.scales
    assert got.block == (4, 3) and changed.nonzero().tolist() == [[2, 3]]


def test_an_fp8_folder_is_itself(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder = tiny_folder("5", fp8=True, dtype="bfloat16")
    rewrite_as_fp8(folder, tmp_path / "hf", Glm5Config.from_hf(folder))
    assert same_folder(tensors_of(tmp_path / "hf"), tensors_of(folder))
    for name in sorted(SMALL_FILES - {"config.json"}):
        assert (tmp_path / "hf" / name).read_bytes() == (folder / name).read_bytes()
    read = [json.loads((f / "config.json").read_text()) for f in (tmp_path / "hf", folder)]
    assert read[0]["quantization_config"] == read[1]["quantization_config"]
    index = json.loads((tmp_path / "hf" / INDEX_FILE).read_text())["weight_map"]
    assert index.keys() == tensors_of(folder).keys()


def test_a_plain_folder_becomes_the_release_that_is_made_quantised(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    plain, release = tiny_folder("5.2"), tiny_folder("5.2", fp8=True)
    rewrite_as_fp8(plain, tmp_path / "hf", Glm5Config.from_hf(plain))
    assert same_folder(tensors_of(tmp_path / "hf"), tensors_of(release))
    assert Glm5Config.from_hf(tmp_path / "hf").fp8 == Glm5Config.from_hf(release).fp8
    kept = json.loads((tmp_path / "hf/config.json").read_text())["quantization_config"]
    for module in ("model.layers.4.mlp.gate", "lm_head", "model.layers.7.eh_proj"):
        assert module in kept["modules_to_not_convert"]
    assert "model.layers.4.self_attn.kv_b_proj" not in kept["modules_to_not_convert"]


@pytest.mark.parametrize("fp8", [True, False])
def test_change_sees_every_weight_once_as_it_is_stored(
    tiny_folder: TinyFolder, tmp_path: Path, fp8: bool
) -> None:
    folder = tiny_folder("5", fp8=fp8, dtype="bfloat16")
    seen: dict[str, Weight] = {}

    def negate(name: str, weight: Weight) -> Weight:
        assert name not in seen
        seen[name] = weight
        if isinstance(weight, BlockScaled):
            return BlockScaled((-weight.values.float()).to(FP8_DTYPE), weight.scales, weight.block)
        return -weight

    rewrite_as_fp8(folder, tmp_path / "hf", Glm5Config.from_hf(folder), negate)
    stored, got = tensors_of(folder), tensors_of(tmp_path / "hf")
    assert seen.keys() == {name for name in stored if not name.endswith(SCALE_SUFFIX)}
    q_a, norm = "model.layers.0.self_attn.q_a_proj.weight", "model.norm.weight"
    assert isinstance(seen[q_a], BlockScaled) == fp8
    if not fp8:
        # nothing is rounded to bf16 between a change and float8
        assert isinstance(seen[q_a], Tensor) and seen[q_a].dtype == torch.float32
    values = stored[q_a] if fp8 else quantise(stored[q_a]).values
    assert torch.equal(got[q_a].float(), -values.float())
    assert torch.equal(got[norm], -stored[norm])


def test_a_plain_tensor_in_the_place_of_a_quantised_one_is_quantised(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    folder, name = tiny_folder("5", fp8=True), "model.layers.0.mlp.down_proj.weight"
    new = torch.randn(tensors_of(folder)[name].shape)
    rewrite_as_fp8(
        folder, tmp_path / "hf", Glm5Config.from_hf(folder), lambda n, w: new if n == name else w
    )
    got, scaled = tensors_of(tmp_path / "hf"), quantise(new)
    assert same(got[name], scaled.values) and same(got[name + SCALE_SUFFIX], scaled.scales)


def test_a_failure_leaves_nothing(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    def fail(name: str, weight: Weight) -> Weight:
        if "norm" in name:
            raise KeyError(name)
        return weight

    folder = tiny_folder("5")
    with pytest.raises(KeyError):
        rewrite_as_fp8(folder, tmp_path / "hf", Glm5Config.from_hf(folder), fail)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_scale_is_named(tiny_folder: TinyFolder, tmp_path: Path) -> None:
    folder, lacking = tiny_folder("5", fp8=True), "model.layers.0.self_attn.o_proj.weight"

    def lose(tensors: dict[str, Tensor]) -> None:
        del tensors[lacking + SCALE_SUFFIX]

    broken = rewrite(folder, tmp_path / "broken", lose)
    with pytest.raises(CheckpointError, match=lacking):
        rewrite_as_fp8(broken, tmp_path / "hf", Glm5Config.from_hf(broken))
    assert not (tmp_path / "hf").exists()


def spoil(scale: Tensor, value: float) -> None:
    scale[-1, -1] = value


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0])
def test_a_weight_that_is_no_number_is_named(
    tiny_folder: TinyFolder, tmp_path: Path, bad: float
) -> None:
    folder, name = tiny_folder("5", fp8=True), "model.layers.0.self_attn.o_proj.weight"
    broken = rewrite(
        folder, tmp_path / "broken", lambda tensors: spoil(tensors[name + SCALE_SUFFIX], bad)
    )
    with pytest.raises(CheckpointError, match=f"{name}(?s:.*)not positive or too large"):
        rewrite_as_fp8(broken, tmp_path / "hf", Glm5Config.from_hf(broken))
    assert not (tmp_path / "hf").exists()
