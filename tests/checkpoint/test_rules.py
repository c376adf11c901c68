import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from glm5.checkpoint.glm5_rules import glm5_rules, hf_modules, mtp_hf_names, templates
from glm5.checkpoint.hf_layout import hf_tensors
from glm5.checkpoint.rules import GatedPair, HalfSwap, Rename, Rule, check_total
from glm5.checkpoint.safetensors_file import plan_of
from glm5.checkpoint.safetensors_io import SafetensorsReader
from glm5.checkpoint.safetensors_writer import SafetensorsWriter
from glm5.checkpoint.tiny import tiny_config
from glm5.config import Glm5Config
from glm5.errors import CheckpointError

CONFIGS = Path(__file__).parents[2] / "src/glm5/configs"


class CountingReader:
    """A reader over tensors in memory that counts the elements it hands out."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors
        self.num_read = 0

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def file_of(self, name: str) -> Path:
        return Path("model.safetensors")

    def read(self, name: str) -> Tensor:
        self.num_read += self.tensors[name].numel()
        return self.tensors[name].clone()

    def read_slice(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        part = self.tensors[name].narrow(dim, start, stop - start)
        self.num_read += part.numel()
        return part.clone()

    def close(self) -> None:
        pass


def tiny(variant: str) -> Glm5Config:
    return Glm5Config.from_hf_dict(tiny_config(variant))


def test_rename_both_ways() -> None:
    rule = Rename("a.weight", "b.weight")
    tensor = torch.randn(3)
    assert (rule.hf_names, rule.mcore_name) == (("a.weight",), "b.weight")
    assert torch.equal(rule.to_hf(rule.to_mcore([tensor]))[0], tensor)
    with pytest.raises(ValueError, match="too many"):
        rule.to_mcore([tensor, tensor])


def test_gated_pair_puts_gate_rows_first() -> None:
    rule = GatedPair("g", "u", "fc1")
    gate, up = torch.randn(3, 5), torch.randn(3, 5)
    fc1 = rule.to_mcore([gate, up])
    assert torch.equal(fc1[:3], gate)
    assert torch.equal(fc1[3:], up)
    assert [torch.equal(a, b) for a, b in zip(rule.to_hf(fc1), (gate, up), strict=True)] == [
        True,
        True,
    ]
    assert not torch.equal(rule.to_mcore([up, gate]), fc1)


def test_gated_pair_rejects_unequal_halves() -> None:
    rule = GatedPair("g", "u", "fc1")
    with pytest.raises(CheckpointError, match="g and u differ in shape"):
        rule.to_mcore([torch.zeros(3, 5), torch.zeros(2, 5)])
    with pytest.raises(CheckpointError, match="fc1 cannot be halved"):
        rule.to_hf(torch.zeros(5, 2))


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_each_rank_of_a_gated_pair_has_its_gate_and_its_up(tp_size: int) -> None:
    gate, up = torch.randn(8, 3), torch.randn(8, 3)
    rule = GatedPair("g", "u", "fc1")
    shards = []
    for rank in range(tp_size):
        reader = CountingReader(g=gate, u=up)
        local = rule.load(reader, tp_rank=rank, tp_size=tp_size, partition_dim=0)
        parts = [half.chunk(tp_size)[rank] for half in (gate, up)]
        assert torch.equal(local, torch.cat(parts))
        assert reader.num_read == local.numel()
        shards.append(local)
    joined = rule.join(shards, partition_dim=0)
    assert torch.equal(joined[0], gate)
    assert torch.equal(joined[1], up)
    # Cutting the stacked weight instead gives rank 0 nothing but gate rows.
    naive = torch.cat([gate, up]).chunk(tp_size)[0]
    assert torch.equal(shards[0], naive) == (tp_size == 1)


@pytest.mark.parametrize("partition_dim", [0, 1])
def test_a_rename_is_cut_along_one_dimension(partition_dim: int) -> None:
    tensor = torch.randn(4, 6)
    rule = Rename("a", "b")
    shards = []
    for rank in range(2):
        reader = CountingReader(a=tensor)
        local = rule.load(reader, tp_rank=rank, tp_size=2, partition_dim=partition_dim)
        assert reader.num_read == tensor.numel() // 2
        shards.append(local)
    assert torch.equal(torch.cat(shards, partition_dim), tensor)
    assert torch.equal(rule.join(shards, partition_dim)[0], tensor)


def test_a_replicated_tensor_is_whole_on_every_rank() -> None:
    tensor = torch.randn(3)
    reader = CountingReader(a=tensor)
    assert torch.equal(Rename("a", "b").load(reader, tp_rank=1, tp_size=2), tensor)
    assert torch.equal(Rename("a", "b").join([tensor, tensor])[0], tensor)


@pytest.mark.parametrize(("shape", "dim"), [((3, 4), 0), ((4, 3), 1), ((4,), 1)])
def test_ranks_that_do_not_divide_the_dimension(shape: tuple[int, ...], dim: int) -> None:
    reader = CountingReader(a=torch.zeros(shape))
    with pytest.raises(CheckpointError, match=f"a in model.safetensors cannot be cut .* dim {dim}"):
        Rename("a", "b").load(reader, tp_rank=0, tp_size=2, partition_dim=dim)


def test_loading_from_files(tmp_path: Path) -> None:
    gate, up = torch.randn(4, 3), torch.randn(4, 3)
    plan = plan_of({"g": gate, "u": up})
    with SafetensorsWriter(tmp_path / "m", plan, max_shard_bytes=1) as writer:
        writer.add("g", gate)
        writer.add("u", up)
    with SafetensorsReader(tmp_path / "m") as reader:
        local = GatedPair("g", "u", "fc1").load(reader, tp_rank=1, tp_size=2, partition_dim=0)
    assert torch.equal(local, torch.cat([gate[2:], up[2:]]))


def test_check_total_accepts_an_exact_cover() -> None:
    check_total([Rename("a", "x"), GatedPair("b", "c", "y")], ["c", "a", "b"], ["y", "x"])
    check_total([], [], [])


@pytest.mark.parametrize(
    ("hf", "mcore", "finding"),
    [
        ("ab", "xy", "sources that are missing: 1: c"),
        ("abcd", "xy", "sources that no rule covers: 1: d"),
        ("abc", "x", "targets that are missing: 1: y"),
        ("abc", "xyz", "targets that no rule covers: 1: z"),
        ("aabc", "xy", "sources present twice: 1: a"),
    ],
)
def test_check_total_names_what_is_wrong(hf: str, mcore: str, finding: str) -> None:
    with pytest.raises(CheckpointError, match=finding):
        check_total([Rename("a", "x"), GatedPair("b", "c", "y")], hf, mcore)


def test_check_total_finds_a_tensor_in_two_rules() -> None:
    with pytest.raises(CheckpointError, match="sources in two rules: 1: a; targets in two rules"):
        check_total([Rename("a", "x"), Rename("a", "x")], "a", "x")


def test_check_total_lists_ten_names_and_the_count() -> None:
    with pytest.raises(CheckpointError, match=r"11: n00, .*n09, \.\.\.") as caught:
        check_total([], [f"n{i:02}" for i in range(11)], [])
    assert "n10" not in str(caught.value)


@pytest.mark.parametrize("variant", ["5", "5.2"])
@pytest.mark.parametrize("include_mtp", [True, False])
def test_rules_use_every_tensor_of_the_checkpoint_once(variant: str, include_mtp: bool) -> None:
    config = tiny(variant)
    rules = glm5_rules(config, include_mtp=include_mtp)
    hf = set(hf_tensors(config))
    if not include_mtp:
        hf -= set(mtp_hf_names(config))
    targets = [rule.mcore_name for rule in rules]
    assert len(targets) == len(set(targets))
    check_total(rules, hf, targets)
    assert not any("{" in name for rule in rules for name in (*rule.hf_names, rule.mcore_name))


def test_rules_of_the_published_models() -> None:
    for file, mtp in (("glm5.json", False), ("glm52.json", True)):
        config = Glm5Config.from_hf_dict(json.loads((CONFIGS / file).read_text()))
        rules = glm5_rules(config, include_mtp=mtp)
        names = sum(len(rule.hf_names) for rule in rules)
        assert names == {"glm5.json": 59_079, "glm52.json": 59_585}[file]
        assert len(mtp_hf_names(config)) == 791


def decoder_layer(prefix: str, *, indexer: bool, num_experts: int) -> set[str]:
    """The Megatron names of one layer, written out; no experts means a dense layer."""
    attention = f"{prefix}.self_attention"
    linears = ("linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj")
    linears += ("linear_kv_up_proj", "linear_proj", "q_layernorm", "kv_layernorm")
    names = {f"{attention}.{linear}.weight" for linear in linears}
    names |= {f"{prefix}.input_layernorm.weight", f"{prefix}.pre_mlp_layernorm.weight"}
    if indexer:
        parts = ("linear_wq_b.weight", "linear_wk.weight", "k_norm.weight", "k_norm.bias")
        parts += ("linear_weights_proj.weight",)
        names |= {f"{attention}.indexer.{part}" for part in parts}
    mlps = [f"{prefix}.mlp"]
    if num_experts:
        names |= {f"{prefix}.mlp.router.weight", f"{prefix}.mlp.router.expert_bias"}
        mlps = [f"{prefix}.mlp.experts.local_experts.{e}" for e in range(num_experts)]
        mlps.append(f"{prefix}.mlp.shared_experts")
    return names | {f"{mlp}.{fc}.weight" for mlp in mlps for fc in ("linear_fc1", "linear_fc2")}


def test_megatron_names_of_tiny_5_2() -> None:
    names = {"embedding.word_embeddings.weight", "output_layer.weight"}
    names.add("decoder.final_layernorm.weight")
    for layer in range(7):
        indexer = layer in {0, 1, 2, 6}
        experts = 8 if layer >= 3 else 0
        names |= decoder_layer(f"decoder.layers.{layer}", indexer=indexer, num_experts=experts)
    mtp = decoder_layer("mtp.layers.0.mtp_model_layer", indexer=True, num_experts=8)
    for extra in ("enorm", "hnorm", "eh_proj", "final_layernorm"):
        mtp.add(f"mtp.layers.0.{extra}.weight")
    config = tiny("5.2")
    assert {rule.mcore_name for rule in glm5_rules(config, include_mtp=False)} == names
    assert {rule.mcore_name for rule in glm5_rules(config, include_mtp=True)} == names | mtp


def test_some_pairs_of_names() -> None:
    pairs = {r.mcore_name: r.hf_names for r in glm5_rules(tiny("5.2"), include_mtp=True)}
    hf, mcore = "model.layers.6.self_attn", "decoder.layers.6.self_attention"
    assert pairs[f"{mcore}.linear_kv_up_proj.weight"] == (f"{hf}.kv_b_proj.weight",)
    assert pairs[f"{mcore}.indexer.linear_wk.weight"] == (f"{hf}.indexer.wk.weight",)
    assert pairs["decoder.layers.3.mlp.experts.local_experts.5.linear_fc1.weight"] == (
        "model.layers.3.mlp.experts.5.gate_proj.weight",
        "model.layers.3.mlp.experts.5.up_proj.weight",
    )
    assert pairs["mtp.layers.0.final_layernorm.weight"] == (
        "model.layers.7.shared_head.norm.weight",
    )
    assert pairs["mtp.layers.0.mtp_model_layer.mlp.router.expert_bias"] == (
        "model.layers.7.mlp.gate.e_score_correction_bias",
    )


def test_hf_modules_come_from_the_same_rules() -> None:
    modules = hf_modules(glm5_rules(tiny("5.2"), include_mtp=True))
    assert modules["decoder.layers.3.self_attention.linear_q_down_proj"] == (
        "model.layers.3.self_attn.q_a_proj",
    )
    assert modules["decoder.layers.0.mlp.linear_fc1"] == (
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.up_proj",
    )
    assert modules["mtp.layers.0.mtp_model_layer.mlp.shared_experts.linear_fc2"] == (
        "model.layers.7.mlp.shared_experts.down_proj",
    )
    assert "decoder.layers.0.self_attention.indexer.k_norm.bias" not in modules


def test_templates_have_placeholders_and_cannot_be_changed() -> None:
    table = templates()
    names = [rule.mcore_name for rule in table["expert"]]
    assert names[0] == (
        "decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight"
    )
    assert table["mtp"][0].fill(layer=7, mtp=0) == Rename(
        "model.layers.7.enorm.weight", "mtp.layers.0.enorm.weight"
    )
    with pytest.raises(TypeError):
        table["model"] = ()


@pytest.mark.parametrize("variant", ["5", "5.2"])
def test_hf_to_megatron_to_hf_is_bitwise(variant: str) -> None:
    config = tiny(variant)
    source = {name: torch.randn(spec.shape) for name, spec in hf_tensors(config).items()}
    rules: list[Rule] = glm5_rules(config, include_mtp=True)
    model = {r.mcore_name: r.to_mcore([source[name] for name in r.hf_names]) for r in rules}
    back = {
        name: tensor
        for rule in rules
        for name, tensor in zip(rule.hf_names, rule.to_hf(model[rule.mcore_name]), strict=True)
    }
    assert back.keys() == source.keys()
    assert all(torch.equal(back[name], source[name]) for name in source)


def heads(count: int, head_dim: int, *rest: int) -> Tensor:
    """[count * head_dim, *rest], every value another one."""
    size = (count * head_dim, *rest)
    return torch.arange(math.prod(size), dtype=torch.float32).view(size)


@pytest.mark.parametrize("rest", [(), (3,)])
def test_half_swap_exchanges_the_halves_of_every_head(rest: tuple[int, ...]) -> None:
    rule = HalfSwap("a.{layer}", "b.{layer}", 4, 2).fill(layer=1)
    assert (rule.hf_names, rule.mcore_name) == (("a.1",), "b.1")
    tensor = heads(3, 4, *rest)
    swapped = rule.to_mcore([tensor])
    assert torch.equal(swapped, tensor[[2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9]])
    assert torch.equal(rule.to_hf(swapped)[0], tensor)
    # its own inverse
    assert torch.equal(rule.to_mcore([swapped]), tensor)


@pytest.mark.parametrize("partition_dim", [0, 1])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_half_swap_of_shards_is_the_shards_of_the_swap(tp_size: int, partition_dim: int) -> None:
    rule, tensor = HalfSwap("a", "b", 4, 2), heads(4, 4, 8).bfloat16()
    reader = CountingReader(a=tensor)
    shards = [
        rule.load(reader, tp_rank=rank, tp_size=tp_size, partition_dim=partition_dim)
        for rank in range(tp_size)
    ]
    assert torch.equal(torch.cat(shards, partition_dim), rule.to_mcore([tensor]))
    assert torch.equal(rule.join(shards, partition_dim)[0], tensor)


@pytest.mark.parametrize(("head_dim", "rope_dim"), [(4, 1), (4, 3), (2, 4), (3, 1), (0, 0), (4, 4)])
def test_half_swap_refuses_a_rope_that_is_not_half_of_the_head(
    head_dim: int, rope_dim: int
) -> None:
    with pytest.raises(CheckpointError, match="cannot be exchanged") as caught:
        HalfSwap("a", "b", head_dim, rope_dim)
    assert str(head_dim) in str(caught.value.got) and "half" in str(caught.value.expected)


def test_half_swap_refuses_a_part_of_a_head() -> None:
    rule = HalfSwap("a", "b", 4, 2)
    with pytest.raises(CheckpointError, match="b does not consist of whole heads"):
        rule.to_mcore([torch.zeros(6, 2)])
    with pytest.raises(CheckpointError, match="whole heads"):
        rule.load(CountingReader(a=torch.zeros(4, 2)), tp_size=2, partition_dim=0)
