"""Float8 weights reach the model as published, or as the whole tensor would be quantised."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.block_scaled import fill_block_scaled
from glm5.checkpoint.convert import block_scaled_tensors
from glm5.checkpoint.fp8 import Fp8DequantReader, open_checkpoint
from glm5.checkpoint.glm5_rules import glm5_rules
from glm5.checkpoint.hf_layout import hf_tensors
from glm5.checkpoint.load import load_model
from glm5.checkpoint.rules import GatedPair, Rename, Rule
from glm5.checkpoint.safetensors_file import plan_of
from glm5.checkpoint.safetensors_io import SafetensorsReader
from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.config import Fp8Quantization, Glm5Config
from glm5.errors import CheckpointError
from glm5.model.frozen import own_block
from glm5.ops.block_scaled import BLOCK, BlockScaled, quantise, scale_grid
from tests.hf_folders import rewrite
from tests.tiny_models import SMALL_BLOCK, TinyFolder, varied

O_PROJ = "model.layers.0.self_attn.o_proj.weight"
UP_PROJ = "model.layers.1.mlp.experts.5.up_proj.weight"
SMALL = (16, 12)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def by_hf_name(folder: Path) -> dict[str, BlockScaled]:
    """What a model on frozen weights holds, in the checkpoint's tensors."""
    model = load_model(folder, base_weights="fp8", include_mtp=True)
    held, found = block_scaled_tensors(model), {}
    for rule in glm5_rules(model.config.glm5, include_mtp=True):
        if (weight := held.get(rule.mcore_name)) is not None:
            parts = rule.to_hf(weight.values), rule.to_hf(weight.scales)
            for name, values, scales in zip(rule.hf_names, *parts, strict=True):
                found[name] = BlockScaled(values, scales, weight.block)
    return found


@pytest.mark.parametrize("variant", ["5", "5.2"])
def test_values_and_scales_are_those_of_the_files(fp8_folder: TinyFolder, variant: str) -> None:
    folder = fp8_folder(variant)
    layout = hf_tensors(Glm5Config.from_hf(folder))
    held = by_hf_name(folder)
    assert held.keys() == {name for name, tensor in layout.items() if tensor.quantisable}
    with SafetensorsReader(folder) as reader:
        for name, weight in held.items():
            published = BlockScaled(
                reader.read(name), reader.read(f"{name}_scale_inv"), SMALL_BLOCK
            ).in_blocks(weight.block)
            assert torch.equal(bits(weight.values), bits(published.values)), name
            assert torch.equal(weight.scales, published.scales), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_weights_are_quantised_by_published_blocks(
    tiny_folder: TinyFolder, dtype: str
) -> None:
    folder = tiny_folder("5", dtype=dtype)
    with SafetensorsReader(folder) as reader:
        for name, weight in by_hf_name(folder).items():
            expected = quantise(reader.read(name), BLOCK)
            assert torch.equal(bits(weight.values), bits(expected.values)), name
            assert torch.equal(weight.scales, expected.in_blocks(weight.block).scales), name


def test_a_weight_that_an_fp8_folder_keeps_is_quantised(
    fp8_folder: TinyFolder, tmp_path: Path
) -> None:
    weight = varied(torch.randn(64, 128), SMALL)

    def keep(tensors: dict[str, Tensor]) -> None:
        tensors[O_PROJ] = weight
        del tensors[f"{O_PROJ}_scale_inv"]

    held = by_hf_name(rewrite(fp8_folder("5"), tmp_path / "hf", keep))[O_PROJ]
    assert torch.equal(bits(held.values), bits(quantise(weight, SMALL_BLOCK).values))


class Noting(SafetensorsReader):
    """Notes how many bytes are read."""

    num_bytes = 0

    def read(self, name: str) -> Tensor:
        tensor = super().read(name)
        self.num_bytes += tensor.nbytes
        return tensor

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        tensor = super().read_slice(name, dim, start, stop)
        self.num_bytes += tensor.nbytes
        return tensor


def empty(shape: tuple[int, int], cut: int, ranks: int, parts: int) -> BlockScaled:
    """A rank's weight without values, as a model holds it."""
    sizes = list(shape)
    sizes[cut] //= ranks
    block = own_block(SMALL, sizes[cut], cut, ranks, parts)
    values = torch.full(sizes, torch.nan).to(torch.float8_e4m3fn)
    return BlockScaled(values, torch.full(scale_grid((sizes[0], sizes[1]), block), -1.0), block)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("is_fp8", [True, False])
@pytest.mark.parametrize(("cut", "parts"), [(0, 1), (1, 1), (0, 2)])
def test_every_ranks_part_is_that_of_the_whole(
    tmp_path: Path, ranks: int, cut: int, is_fp8: bool, parts: int
) -> None:
    """104 rows or columns over 4 ranks: none of the inner ones begins on a block."""
    rows, columns = (104, 40) if cut == 0 else (40, 104)
    weights = {f"w{i}": varied(torch.randn(rows, columns), SMALL, seed=i) for i in range(parts)}
    whole = {name: quantise(weight, SMALL) for name, weight in weights.items()}
    reader: Noting | Fp8DequantReader = written(tmp_path, weights, whole, is_fp8=is_fp8)
    rule: Rule = Rename("w0", "w") if parts == 1 else GatedPair("w0", "w1", "w")
    got = []
    for rank in range(ranks):
        target = empty((rows * parts, columns), cut, ranks, parts)
        fill_block_scaled(target, rule, reader, tp_rank=rank, tp_size=ranks, partition_dim=cut)
        got.append(rule.to_hf(target.dequantise(torch.float32)))
    for index, name in enumerate(weights):
        joined = torch.cat([parts[index] for parts in got], dim=cut)
        assert torch.equal(joined, whole[name].dequantise(torch.float32))


def written(
    folder: Path, weights: dict[str, Tensor], whole: dict[str, BlockScaled], *, is_fp8: bool
) -> Fp8DequantReader:
    """The weights on disk, in float8 or as they are beside a weight that is."""
    tensors = {"other": whole["w0"].values, "other_scale_inv": whole["w0"].scales}
    for name, weight in weights.items():
        if is_fp8:
            tensors[name], tensors[f"{name}_scale_inv"] = whole[name].values, whole[name].scales
        else:
            tensors[name] = weight
    with SafetensorsWriter(folder / "m", plan_of(tensors)) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    fp8 = Fp8Quantization(weight_block_size=SMALL)
    return Fp8DequantReader(Noting(folder / "m"), fp8, torch.float32)


def test_a_rank_reads_its_part_and_the_blocks_around_it(tmp_path: Path) -> None:
    weight = varied(torch.randn(104, 40), SMALL)
    for is_fp8, row_bytes in ((True, 40), (False, 160)):
        folder = tmp_path / str(is_fp8)
        reader = written(folder, {"w0": weight}, {"w0": quantise(weight, SMALL)}, is_fp8=is_fp8)
        target = empty((104, 40), 0, 4, 1)
        share = {"tp_rank": 1, "tp_size": 4, "partition_dim": 0}
        fill_block_scaled(target, Rename("w0", "w"), reader, **share)
        # rows 26 to 51 in float8 with the scales of rows 16 to 63; else those rows themselves
        expected = 26 * row_bytes + 3 * 4 * 4 if is_fp8 else 48 * row_bytes
        assert reader._reader.num_bytes == expected


Change = Callable[[dict[str, Tensor]], None]


def set_scale(value: float) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{UP_PROJ}_scale_inv"][-1, -1] = value

    return change


def nan_values(tensors: dict[str, Tensor]) -> None:
    tensors[UP_PROJ].view(torch.uint8)[3, 5] = 0xFF


def wide_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP_PROJ}_scale_inv"] = torch.ones(7, 1)


def no_scale(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{UP_PROJ}_scale_inv"]


def narrow_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP_PROJ}_scale_inv"] = tensors[f"{UP_PROJ}_scale_inv"].bfloat16()


@pytest.mark.parametrize("base_weights", ["fp8", "dtype"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (set_scale(0.0), "scales that are not positive or too large$"),
        (set_scale(-1.0), "scales that are not positive or too large$"),
        (set_scale(torch.nan), "scales that are not positive or too large$"),
        (set_scale(torch.inf), "scales that are not positive or too large$"),
        # 448 of it is beyond fp32
        (set_scale(1e36), "scales that are not positive or too large$"),
        (nan_values, "got: +NaN values$"),
        (wide_scale, "has the wrong shape"),
        (no_scale, "without their _scale_inv"),
        (narrow_scale, "is not block-quantised"),
    ],
)
def test_a_broken_tensor_is_named(
    fp8_folder: TinyFolder, tmp_path: Path, change: Change, reason: str, base_weights: str
) -> None:
    folder = rewrite(fp8_folder("5"), tmp_path / "hf", change)
    with pytest.raises(CheckpointError, match=f"(?m){reason}") as caught:
        load_model(folder, base_weights=base_weights)
    assert UP_PROJ in str(caught.value)


def test_a_weight_that_is_no_number_is_not_quantised(
    tiny_folder: TinyFolder, tmp_path: Path
) -> None:
    for value in (torch.nan, torch.inf):

        def change(tensors: dict[str, Tensor], value: float = value) -> None:
            tensors[UP_PROJ][3, 5] = value

        folder = rewrite(tiny_folder("5"), tmp_path / str(value), change)
        with pytest.raises(CheckpointError, match="not a block-scaled weight") as caught:
            load_model(folder, base_weights="fp8")
        assert UP_PROJ in str(caught.value)


def test_tensors_of_another_shape_are_named(fp8_folder: TinyFolder, tmp_path: Path) -> None:
    folder = fp8_folder("5")
    config = Glm5Config.from_hf(folder)
    (rule,) = (r for r in glm5_rules(config, include_mtp=False) if r.hf_names == (O_PROJ,))
    with (
        open_checkpoint(folder, config) as reader,
        pytest.raises(CheckpointError, match=f"{O_PROJ} in .* has the wrong shape"),
    ):
        target = empty((64, 64), 0, 1, 1)
        fill_block_scaled(target, rule, reader, tp_rank=0, tp_size=1, partition_dim=None)
