"""Which linears an adapter may sit on, and how PEFT names, nests and targets each of them."""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from glm5.checkpoint.hf_layout import hf_tensors
from glm5.config import Glm5Config

ATTENTION_TARGETS = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
INDEXER_TARGETS = ("wq_b", "wk", "weights_proj")
MLP_TARGETS = ("gate_proj", "up_proj", "down_proj")

# transformers keeps all experts of a layer in these parameters; PEFT nests its wrappers in this
# order (that of the class body, whatever the order of target_parameters), the last one outermost.
FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}

_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(\w+)")
_FUSED = re.compile(r"(.+\.mlp\.experts)\.(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class FusedWeight:
    """One fused expert parameter of one layer: `owner` is its `...mlp.experts` module."""

    owner: str
    projections: tuple[str, ...]

    def path(self, expert: int, projection: str) -> str:
        """The Hugging Face path of one expert's linear inside this parameter."""
        return f"{self.owner}.{expert}.{projection}"


def adapter_linears(config: Glm5Config) -> dict[str, tuple[int, int]]:
    """Hugging Face path -> (out, in) of every linear that an adapter may sit on.

    MTP layers are left out: transformers never builds them, so PEFT could not hold their adapters.
    """
    leaves = {*ATTENTION_TARGETS, *INDEXER_TARGETS, *MLP_TARGETS}
    linears: dict[str, tuple[int, int]] = {}
    for name, tensor in hf_tensors(config).items():
        path = name.removesuffix(".weight")
        if path.rpartition(".")[2] in leaves and not is_mtp(path, config):
            out_features, in_features = tensor.shape
            linears[path] = (out_features, in_features)
    return linears


def module_tensors(config: Glm5Config) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that may train whole: router, norms, embeddings, head.

    Linears get factors instead, and MTP layers nothing at all.
    """
    linears = adapter_linears(config)
    return {
        name: tensor.shape
        for name, tensor in hf_tensors(config).items()
        if name.removesuffix(".weight") not in linears and not is_mtp(name, config)
    }


def is_mtp(name: str, config: Glm5Config) -> bool:
    """Whether a tensor or module lies in a layer behind the decoder's last."""
    parts = name.split(".")
    in_layer = parts[:2] == ["model", "layers"] and len(parts) > 2 and parts[2].isdecimal()
    return in_layer and int(parts[2]) >= config.num_hidden_layers


def peft_weight(path: str) -> str:
    """The name by which PEFT must target the linear at `path`.

    Attention and indexer linears go by module name. MLP linears go by parameter name: PEFT rewrites
    any module target called gate_proj, up_proj or down_proj to the routed experts alone.
    """
    if expert := _EXPERT.fullmatch(path):
        owner, _, leaf = expert.groups()
        fused = next(name for name, leaves in FUSED_EXPERTS.items() if leaf in leaves)
        return f"{owner}.{fused}"
    return f"{path}.weight" if path.endswith(MLP_TARGETS) else path


def peft_weights(paths: Iterable[str]) -> list[str]:
    """The weights that hold `paths`, each once, in order of first appearance."""
    return list(dict.fromkeys(peft_weight(path) for path in paths))


def fused_weight(weight: str) -> FusedWeight | None:
    """What the weight name says about a fused expert parameter; None for an ordinary linear."""
    match = _FUSED.fullmatch(weight)
    return FusedWeight(match[1], FUSED_EXPERTS[match[2]]) if match else None


def fused_width(weight: str) -> int:
    """How many projections lie in a weight: its adapter has so many times the rank of one."""
    fused = fused_weight(weight)
    return len(fused.projections) if fused else 1


def weight_shapes(
    weight: str, linears: Mapping[str, tuple[int, int]], *, rank: int, num_experts: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of lora_A and lora_B in the file; `rank` is the weight's own, over all projections."""
    if fused := fused_weight(weight):
        out_features, in_features = linears[fused.path(0, fused.projections[0])]
        inner = num_experts * rank
        return (inner, in_features), (len(fused.projections) * out_features, inner)
    out_features, in_features = linears[weight.removesuffix(".weight")]
    return (rank, in_features), (out_features, rank)


def peft_keys(weights: Collection[str]) -> dict[str, str]:
    """Weight name -> key in the adapter file, short of `.lora_A.weight` and `.lora_B.weight`.

    Wrappers of one experts module nest: with both parameters adapted, gate_up_proj is inside
    (`experts.base_layer`) and down_proj outside (`experts`); alone, either one is at `experts`.
    """
    present = set(weights)
    keys = {}
    for weight in weights:
        module = weight.removesuffix(".weight")
        if match := _FUSED.fullmatch(weight):
            order = [name for name in FUSED_EXPERTS if f"{match[1]}.{name}" in present]
            outside = len(order) - 1 - order.index(match[2])
            module = match[1] + ".base_layer" * outside
        keys[weight] = f"base_model.model.{module}"
    return keys


def short_name(weight: str) -> str:
    """The shortest target that names this kind of weight in every layer and no other kind."""
    parts = weight.split(".")
    is_module = parts[-1] in ATTENTION_TARGETS + INDEXER_TARGETS
    return ".".join(parts[-1 if is_module else -3 :])


def peft_targets(
    weights: Collection[str], all_weights: Collection[str]
) -> tuple[list[str], list[str]]:
    """(target_modules, target_parameters) that match exactly `weights` among `all_weights`.

    A kind adapted wherever it exists is named once; otherwise each weight is named in full.
    """
    partial = {short_name(weight) for weight in set(all_weights) - set(weights)}
    modules: dict[str, None] = {}
    parameters: dict[str, None] = {}
    for weight in weights:
        short = short_name(weight)
        targets = parameters if "." in short else modules
        targets[weight if short in partial else short] = None
    return list(modules), list(parameters)
