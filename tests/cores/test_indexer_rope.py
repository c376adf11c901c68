"""The core's own indexer, loaded through the rules, chooses the keys that transformers chooses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.core_reader import CoreReader
from glm5.config import Glm5Config
from glm5.export.core import core_from_hf
from glm5.parity.hf_side import load_reference
from glm5.runtime.megatron_core import RopeSlice, probe_core
from tests.cores.core_indexer import build_indexer
from tests.tiny_models import TinyFolder

pytestmark = pytest.mark.cores

OTHER: dict[RopeSlice, RopeSlice] = {"first": "last", "last": "first"}


def chosen(topk_indices: Tensor, visible: Tensor) -> Tensor:
    """[s, s] bool: the visible keys among the indices [s, topk], of which -1 is none."""
    length = len(visible)
    indices = topk_indices.long().where(topk_indices >= 0, length)
    mask = torch.zeros(length, length + 1, dtype=torch.bool).scatter(1, indices, True)
    return mask[:, :length] & visible


@torch.no_grad()
def selections(
    folder: Path, core: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor, Tensor]:
    """(core's, transformers', keys that a query sees), each [s, s] bool; s is far above topk."""
    glm5 = Glm5Config.from_hf(folder)
    length = 3 * glm5.index_topk + 5
    indexer = build_indexer(glm5, monkeypatch)
    reader = CoreReader(core)
    prefix = "decoder.layers.0.self_attention.core_attention.indexer."
    weights = {
        name.removeprefix(prefix): reader.read(name)
        for name in reader.names()
        if name.startswith(prefix)
    }
    indexer.load_state_dict(weights)
    reference: Any = load_reference(folder, glm5, torch.device("cpu")).model
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, length, glm5.hidden_size, generator=generator)
    q_latent = torch.randn(1, length, glm5.q_lora_rank, generator=generator)
    visible = torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.zeros(1, length, length).masked_fill(~visible, -torch.inf)
    _, ours = indexer.forward_with_scores(x.transpose(0, 1), q_latent.transpose(0, 1), mask)
    positions = torch.arange(length)[None]
    rope = reference.rotary_emb(x, positions)
    theirs = reference.layers[0].self_attn.indexer(x, q_latent, rope, mask, positions)
    return chosen(ours[0], visible), chosen(theirs[0], visible), visible


@pytest.mark.parametrize("variant", ["5", "5.2"])
def test_the_rule_makes_the_cores_indexer_choose_as_transformers(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    core_from_hf(tiny_folder(variant), tmp_path / "core")
    ours, theirs, visible = selections(tiny_folder(variant), tmp_path / "core", monkeypatch)
    assert torch.equal(ours, theirs)
    # not because everything was chosen
    assert ours.sum() < visible.sum() / 2


def test_with_the_halves_the_other_way_round_it_chooses_others(
    tiny_folder: TinyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = OTHER[probe_core().indexer_rope]
    core_from_hf(tiny_folder("5"), tmp_path / "core", indexer_rope=wrong)
    ours, theirs, _ = selections(tiny_folder("5"), tmp_path / "core", monkeypatch)
    assert (ours & ~theirs).sum() > 0.05 * theirs.sum()
