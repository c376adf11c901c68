"""What each process of a layout does with Megatron-Bridge; imported before processes are made."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config, unwrap_model
from torch import Tensor

from glm5.checkpoint.megatron_io import save_sharded
from glm5.lora.attach import attach_lora
from glm5.lora.seeds import seed_of
from glm5.lora.spec import LoraSpec
from glm5.lora.targets import DEFAULT_TARGETS
from glm5.model.names import GlobalNames
from glm5.runtime.distributed import Layout, ensure_distributed
from tests.bridge.models import bridged, exported, make_lora
from tests.tiny_models import draw_tokens

# Longer than index_topk, so that layers select keys.
ROWS, SEQ_LEN = 2, 24
OWN_LORA = LoraSpec(adapter_rank=3, adapter_alpha=6, targets=DEFAULT_TARGETS)
Gradients = dict[str, dict[str, Any]]


def layout_fields(layout: Layout) -> dict[str, Any]:
    """The provider's fields for a layout."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.tp > 1,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }


def observe(
    hf_dirs: list[Path], out_dir: Path, layout: Layout, loras: list[dict[str, Any]]
) -> dict[str, Any]:
    """Of each checkpoint what is exported; of each LoRA on the last one what it learns.

    The folder written for the first is in out_dir / "saved". Megatron's checkpoints of the last
    one are in out_dir too: with the adapters of each LoRA under its number, with ours in "own".
    """
    ensure_distributed(torch.device("cpu"), layout)
    fields = layout_fields(layout)
    weights = []
    for index, hf_dir in enumerate(hf_dirs):
        bridge, model = bridged(hf_dir, **fields)
        weights.append(exported(bridge, model))
        if index == 0:
            bridge.save_hf_pretrained(model, out_dir / "saved", show_progress=False)
    learned = [
        learn(hf_dirs[-1], fields, options, out_dir / str(which))
        for which, options in enumerate(loras)
    ]
    _, (own,) = bridged(hf_dirs[-1], **fields)
    attach_lora(own, OWN_LORA, seed=0)
    save_checkpoint(out_dir / "own", own)
    rank = dist.get_rank()
    return {"weights": weights if rank == 0 else [], "learned": learned}


def save_checkpoint(folder: Path, model: Any) -> None:
    """Megatron's checkpoint of the whole model, adapters and what they stand on."""
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    save_sharded(folder, model.sharded_state_dict())


def learn(
    hf_dir: Path, fields: dict[str, Any], options: dict[str, Any], checkpoint: Path
) -> dict[str, Any]:
    """One batch through Megatron's schedule, as a host's trainer runs it."""
    bridge, model = bridged(hf_dir, lora=make_lora(**options), data_parallel=True, **fields)
    for chunk in model:
        fill(chunk)
    save_checkpoint(checkpoint, unwrap_model(model[0]))
    config = get_model_config(model[0])
    config.finalize_model_grads_func = finalize_model_grads
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches()) for _ in model] if len(model) > 1 else iter(batches()),
        model=model,
        num_microbatches=2,
        seq_length=SEQ_LEN,
        micro_batch_size=ROWS,
        forward_only=False,
    )
    found = {
        "losses": [float(report["loss"]) for report in reports],
        "gradients": [part for chunk in model for part in gradients_of(chunk)],
    }
    adapters = dict(bridge.export_adapter_weights(model, cpu=True, show_progress=False))
    merged = exported(bridge, model)
    first = dist.get_rank() == 0
    return found | {"adapters": adapters if first else {}, "merged": merged if first else {}}


def batches() -> list[dict[str, Tensor]]:
    """Two micro-batches; a data-parallel rank takes the same as the other."""
    tokens = draw_tokens(2 * ROWS * (SEQ_LEN + 1)).view(2, ROWS, SEQ_LEN + 1)
    return [{"tokens": rows[:, :-1], "labels": rows[:, 1:]} for rows in tokens]


def forward_step(data: Any, model: Any) -> Any:
    """Megatron's calling convention: the output, and what makes a loss of it."""
    batch = next(data)
    positions = torch.arange(SEQ_LEN).expand(ROWS, -1)
    output = model(batch["tokens"], positions, attention_mask=None, labels=batch["labels"])

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = losses.float().sum()
        return total, torch.tensor(losses.numel()), {"loss": total.detach()}

    return output, loss


@torch.no_grad()
def fill(chunk: Any) -> None:
    """Gives every factor values that its global name alone decides, cut as the factor is."""
    for name, factor in factors_of(chunk):
        generator = torch.Generator().manual_seed(seed_of(name))
        shape = list(factor.shape)
        stacked = factor.dim() == 3
        if stacked:
            shape[0] *= parallel_state.get_expert_model_parallel_world_size()
        dim, rank, size = cut_of(name, factor)
        if dim is not None:
            shape[dim] *= size
        whole = 0.1 * torch.randn(shape, generator=generator)
        if stacked:
            ranks = parallel_state.get_expert_model_parallel_world_size()
            whole = whole.chunk(ranks)[parallel_state.get_expert_model_parallel_rank()]
        if dim is not None:
            parts = 2 if is_gated(name) else 1
            whole = torch.cat([p.chunk(size, dim)[rank] for p in whole.chunk(parts, dim)], dim)
        factor.copy_(whole)


def gradients_of(chunk: Any) -> list[tuple[str, dict[str, Any]]]:
    """This rank's finished gradients, each with its place in the whole one."""
    found = []
    for name, factor in factors_of(chunk):
        dim, rank, size = cut_of(name, factor)
        place = {"dim": -1 if dim is None else dim, "rank": rank, "size": size}
        experts = parallel_state.get_expert_model_parallel_rank() if factor.dim() == 3 else -1
        found.append((name, {"part": factor.main_grad.clone(), "experts": experts} | place))
    return found


def factors_of(chunk: Any) -> list[tuple[str, Any]]:
    """(global name, factor) of every adapter."""
    model = unwrap_model(chunk)
    global_name = GlobalNames(model)
    return [(global_name(n), p) for n, p in model.named_parameters() if ".adapter." in n]


def cut_of(name: str, factor: Any) -> tuple[int | None, int, int]:
    """(dimension along which ranks cut a factor, which part this one has, of how many)."""
    if not getattr(factor, "tensor_model_parallel", False):
        return None, 0, 1
    if ".experts." in name:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return int(factor.partition_dim), group.rank(), group.size()


def is_gated(name: str) -> bool:
    """Whether a factor's rows are those of gate above those of up, each cut by itself."""
    return "linear_fc1.adapter.linear_out" in name


def whole_gradients(ranks: list[dict[str, Any]], which: int) -> dict[str, Tensor]:
    """Puts the parts of all ranks together; parts that two ranks have must be the same."""
    parts: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}
    for found in ranks:
        for name, part in found["learned"][which]["gradients"]:
            known = parts.setdefault(name, {})
            key = (part["experts"], part["rank"])
            if key in known:
                largest = float(part["part"].abs().max())
                error = float((known[key]["part"] - part["part"]).abs().max())
                assert error <= 1e-5 * largest, f"{name}: ranks differ by {error} at {largest}"
            known[key] = part
    return {name: _whole(name, known) for name, known in parts.items()}


def _whole(name: str, parts: dict[tuple[int, int], dict[str, Any]]) -> Tensor:
    experts = sorted({experts for experts, _ in parts})
    return torch.cat(
        [_uncut(name, [parts[k] for k in sorted(parts) if k[0] == e]) for e in experts]
    )


def _uncut(name: str, parts: list[dict[str, Any]]) -> Tensor:
    dim, count = parts[0]["dim"], parts[0]["size"]
    tensors = [part["part"] for part in parts]
    if dim < 0:
        return tensors[0]
    assert len(tensors) == count, name
    pieces = [t.chunk(2 if is_gated(name) else 1, dim) for t in tensors]
    return torch.cat([torch.cat(half, dim) for half in zip(*pieces, strict=True)], dim)
