"""What each process of a layout does: train three steps, save, go on from another's checkpoint."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from glm5.checkpoint.adapter_io import write_peft_adapter
from glm5.checkpoint.adapter_start import start_from_adapter
from glm5.checkpoint.ckpt_dir import step_folder
from glm5.checkpoint.fingerprint import base_fingerprints
from glm5.checkpoint.hf_folder import hf_folder
from glm5.export.factors import trained_adapter
from glm5.lora.attach import adapted_modules, base_name, is_adapter
from glm5.model.names import GlobalNames, by_expert
from glm5.ops import torch_backend
from glm5.runtime.distributed import Layout, default_device, ensure_distributed
from glm5.train.chat import TokenizedChat
from glm5.train.loop import TrainLoop
from glm5.train.optimizer import build_optimizer, build_scheduler, wrap_data_parallel
from glm5.train.packing import PackedDataset
from glm5.train.resume import checkpoint_record
from glm5.train.run_config import RunConfig
from glm5.train.state import TrainState
from glm5.train.trainable import build_trainable

# Odd, so that rows are padded where ranks share tokens; long documents cross a shard's border.
SEQ_LENGTH = 29
LENGTHS = (20, 9, 27, 2, 29, 11, 18, 13, 15, 24, 5, 29, 3, 25)
LAST_STEP, LATER_STEPS = 3, (4, 5)


@dataclass(frozen=True)
class Job:
    """One recipe in one layout."""

    hf_dir: Path
    out_dir: Path
    layout: Layout
    recipe: str
    """adapters: LoRA on every linear; shared: that, where experts share factors, and routers,
    norms, embedding and head train beside them; dropout: on some linears; weights: full training
    with a frozen indexer; indexer: full training with the indexer's loss; mtp: that and the MTP
    layer's; heads: the same with attention shared by heads; exact, bf16: adapters in fp32 and in
    bf16 on a model `without_decisions`; fp8: adapters on frozen float8 weights."""
    resume_from: Path | None = None
    """Run folder of another layout, whose last checkpoint is gone on from."""
    recompute: str = "none"
    adapter_rank: int = 3

    def run_config(self) -> RunConfig:
        adapts = self.recipe in ("adapters", "shared", "dropout", "exact", "bf16", "fp8")
        lora: dict[str, Any] | None = {"rank": self.adapter_rank, "alpha": 6.0} if adapts else None
        if lora is not None and self.recipe == "shared":
            lora["expert_lora"] = "shared_outer"
            lora["train"] = ["router", "norms", "embeddings", "lm_head"]
        if lora is not None and self.recipe == "dropout":
            lora |= {"dropout": 0.5, "targets": ["o_proj", "up_proj", "down_proj"]}
        tables: dict[str, Any] = {
            "model": {
                "path": str(self.hf_dir),
                "dtype": "bfloat16" if self.recipe == "bf16" else "float32",
                "base_weights": "fp8" if self.recipe == "fp8" else "dtype",
                "recompute": self.recompute,
                "mtp": self.recipe in ("mtp", "heads"),
            },
            "data": {"train": str(self.hf_dir / "data/train.jsonl"), "seq_length": SEQ_LENGTH},
            # With a small eps Adam turns the sign of a gradient that is zero but for rounding into
            # a whole step.
            "optimizer": {"lr": 1e-2, "eps": 1e-3, "schedule": "linear", "weight_decay": 0.1},
            "train": {"steps": 10, "global_batch_size": 4},
            "layout": {"attention_parallel": "heads" if self.recipe == "heads" else "tokens"},
            "output": {"dir": str(self.out_dir)},
        }
        if lora is not None:
            tables["lora"] = lora
        else:
            trains_indexer = self.recipe in ("indexer", "mtp", "heads")
            tables["train"]["indexer_loss_coeff"] = 0.5 if trains_indexer else 0.0
        return RunConfig.from_dict(tables, source="the test")


def without_decisions(hf_dir: Path, target: Path) -> Path:
    """A copy of a tiny folder whose model routes to all experts and attends to all keys.

    In bf16 a tie in a router or an indexer falls either way, and a token that goes to another
    expert is not an error of rounding size. Here nothing is left to choose.
    """
    shutil.copytree(hf_dir, target)
    config = json.loads((target / "config.json").read_text())
    config |= {"num_experts_per_tok": config["n_routed_experts"], "index_topk": 64}
    (target / "config.json").write_text(json.dumps(config))
    return target


def dataset(lengths: tuple[int, ...] = LENGTHS, seq_length: int = SEQ_LENGTH) -> PackedDataset:
    """Documents of random bytes of these lengths; their first token has no loss."""
    draw = np.random.default_rng(0)
    chats = [
        TokenizedChat(
            draw.integers(0, 256, length).astype(np.int32), np.arange(length) > 0, f"made:{length}"
        )
        for length in lengths
    ]
    return PackedDataset(chats, seq_length)


def train_and_resume(jobs: list[Job]) -> list[dict[str, Any]]:
    """`observe` for each job, in one process group."""
    return [observe(job) for job in jobs]


def observe(job: Job) -> dict[str, Any]:
    """Losses, gradients of the first step, weights after three, and losses of a resumed run."""
    loop = start(job)
    # one row for which a second data-parallel rank has none; before weights differ by rounding,
    # which on these rows turns a near tie of the indexer
    eval_loss = loop.evaluate(dataset(LENGTHS[:3])).mean
    gradients = record_gradients(loop)
    steps = [numbers(loop._step(step)) for step in range(1, LAST_STEP + 1)]
    found = {
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "etp_rank": parallel_state.get_expert_tensor_parallel_rank(),
        "steps": steps,
        "eval_loss": eval_loss,
        "gradients": gradients[0],
        "weights": weights(loop),
        "moments": num_moments(loop),
    }
    save(job, loop)
    if job.resume_from is not None:
        found["resumed"] = resumed_steps(job)
    return found


def resumed_steps(job: Job) -> list[dict[str, float]]:
    """Steps 4 and 5 from the checkpoint of step 3 in `resume_from`."""
    loop = resume(job, LAST_STEP)
    return [numbers(loop._step(step)) for step in LATER_STEPS]


def one_step_more(job: Job, step: int) -> dict[str, float]:
    """The step after the checkpoint of `step` in `resume_from`, saved in turn."""
    loop = resume(job, step)
    values = numbers(loop._step(step + 1))
    save(job, loop, step + 1)
    return values


def resume(job: Job, step: int) -> TrainLoop:
    """The job's loop after the checkpoint of `step` in `resume_from`."""
    assert job.resume_from is not None
    loop = start(job)
    loop.state.load(step_folder(job.resume_from, step))
    return loop


def start(job: Job, data: PackedDataset | None = None) -> TrainLoop:
    """The job's loop before its first step; B of every adapter is not zero."""
    ensure_distributed(default_device(), job.layout)
    run = job.run_config()
    chunks = build_trainable(run, hf_folder(run.model.path))
    for chunk in chunks:
        randomise_adapters(chunk)
    wrapped = wrap_data_parallel(chunks)
    optimizer = build_optimizer(wrapped, run.optimizer)
    scheduler = build_scheduler(optimizer, run.optimizer, run.train.steps)
    state = TrainState(wrapped, optimizer, scheduler)
    return TrainLoop(state, data or dataset(), None, run.train, shuffle=False)


def save(job: Job, loop: TrainLoop, step: int = LAST_STEP) -> None:
    run = job.run_config()
    inputs = base_fingerprints(job.hf_dir)
    glm5 = loop.state.chunks[0].module.config.glm5
    record = checkpoint_record(run, glm5, step, inputs)
    loop.state.save(job.out_dir, record, job.hf_dir, keep=2)


def num_moments(loop: TrainLoop) -> int:
    """Elements of the optimiser's second moments on this rank."""
    parts = loop.state.optimizer.chained_optimizers
    return sum(m["exp_avg_sq"].numel() for part in parts for m in part.optimizer.state.values())


def numbers(values: dict[str, float]) -> dict[str, float]:
    return {name: float(values[name]) for name in ("loss", "grad_norm", "lr", "trained_tokens")}


def record_gradients(loop: TrainLoop) -> list[dict[str, Tensor]]:
    """Fills with the finished gradients of each step, before they are clipped."""
    taken: list[dict[str, Tensor]] = []
    step = loop.state.optimizer.step

    def recording_step() -> Any:
        for chunk in loop.state.chunks:
            complete_gradients(chunk)
        taken.append(gradients_of(loop))
        return step()

    loop.state.optimizer.step = recording_step
    return taken


def complete_gradients(model: DistributedDataParallel) -> None:
    """Fetches what other ranks finished: each has the sums of its own share of the buffers."""
    for bucket_group in model.bucket_groups + model.expert_parallel_bucket_groups:
        group = bucket_group.intra_distributed_optimizer_instance_group
        for bucket in bucket_group.buckets:
            share = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, share, group=group)


def gradients_of(loop: TrainLoop) -> dict[str, Tensor]:
    """Copies of Megatron's gradient buffers by global name."""
    return dict(apart(loop, lambda parameter: parameter.main_grad))


def gradients_when_recomputed(jobs: list[Job]) -> list[dict[str, Any]]:
    """The gradients of one step of four micro-batches, for each job."""
    found = []
    for job in jobs:
        loop = start(job)
        gradients = record_gradients(loop)
        loop._step(1)
        found.append({"gradients": gradients[0], "calls": count_attention_calls(loop)})
    return found


def count_attention_calls(loop: TrainLoop) -> int:
    """How often this stage's first attention core runs in one more step."""
    attention = loop.state.chunks[0].module.decoder.layers[0].self_attention
    calls, core = [], attention._core

    def counted(*args: Any) -> Any:
        calls.append(args)
        return core(*args)

    attention._core = counted
    loop._step(2)
    return len(calls)


def one_short_row(job: Job, lengths: tuple[int, ...]) -> dict[str, Any]:
    """A step on rows of documents of these lengths, and what the first indexer selected."""
    data = dataset(lengths, sum(lengths))
    loop = start(job, data)
    gradients, selected = record_gradients(loop), []
    layer = loop.state.chunks[0].module.decoder.layers[0]
    layer.self_attention.indexer.observed = True
    layer.self_attention.indexer.register_forward_hook(
        lambda module, args, out: selected.append(out[0].clone())
    )
    step = numbers(loop._step(1))
    return {
        "tp_rank": 0,
        "etp_rank": 0,
        "cp_rank": parallel_state.get_context_parallel_rank(),
        "gradients": gradients[0],
        "selected": selected[0],
        "steps": [step],
    }


def weights_of_steps(job: Job, counts: list[int]) -> list[dict[str, Tensor]]:
    """What trains after so many steps, each."""
    loop = start(job)
    found = []
    for step in range(1, counts[-1] + 1):
        loop._step(step)
        if step in counts:
            found.append(weights(loop))
    return found


def dropped_by_experts(job: Job) -> dict[str, Tensor]:
    """Which elements of their first inputs the linears of a layer's experts drop in a step."""
    loop = start(job)
    taken: dict[str, Tensor] = {}

    def note(name: str, drop: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        seen = drop(x)
        taken.setdefault(name, (seen == 0) & (x != 0))
        return seen

    experts = loop.state.chunks[0].module.decoder.layers[3].mlp.experts
    for name, module in experts.named_children():
        module.pair_input = partial(note, name, module.pair_input)
    loop._step(1)
    return taken


def selections_when_shared(jobs: list[Job]) -> list[Tensor]:
    """What the first indexer selects in one step, for each job."""
    found: list[Tensor] = []
    for job in jobs:
        loop = start(job)
        indexer = loop.state.chunks[0].module.decoder.layers[0].self_attention.indexer
        # a selection of every query, short documents too
        indexer.observed = True
        taken: list[Tensor] = []
        indexer.register_forward_hook(lambda module, args, out, taken=taken: taken.append(out[0]))
        loop._step(1)
        found.append(torch.cat(taken))
    return found


def selecting_queries(job: Job, lengths: tuple[int, ...]) -> dict[str, Any]:
    """A step on rows of documents of these lengths, and how many queries each indexer call had."""
    loop = start(job, dataset(lengths, sum(lengths)))
    gradients, selected = record_gradients(loop), []
    select_topk = torch_backend.select_topk

    def noted(q: Tensor, *args: Any) -> Tensor:
        selected.append(len(q))
        return select_topk(q, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_backend, "select_topk", noted)
        step = numbers(loop._step(1))
    return {
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "etp_rank": parallel_state.get_expert_tensor_parallel_rank(),
        "gradients": gradients[0],
        "selected": selected,
        "steps": [step],
    }


def weights(loop: TrainLoop) -> dict[str, Tensor]:
    """Copies of what trains by global name."""
    return dict(apart(loop, lambda parameter: parameter.float()))


def apart(
    loop: TrainLoop, tensor_of: Callable[[nn.Parameter], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """A tensor of everything that trains, by global name; experts one by one."""
    for chunk in loop.state.chunks:
        global_name = GlobalNames(chunk.module)
        for name, parameter in chunk.module.named_parameters():
            if not parameter.requires_grad:
                continue
            tensor = tensor_of(parameter)
            pieces = [(name, tensor)] if is_shared(parameter) else by_expert(name, tensor)
            for one, piece in pieces:
                yield global_name(base_name(one)), piece.detach().cpu().clone()


def is_shared(parameter: nn.Parameter) -> bool:
    """Whether all experts of a layer share an adapter's factor: it has no rank's own mark."""
    return parameter.ndim == 3 and getattr(parameter, "sequence_parallel", False)


def write_adapter(job: Job, folder: Path) -> None:
    """The adapter that `start` gives one process, with other whole parameters, as a PEFT folder."""
    loop = start(job)
    (chunk,) = (chunk.module for chunk in loop.state.chunks)
    adapter = trained_adapter(chunk, torch.float32)
    # a router's bias does not train: it must be the base's
    modules = {n: t if n.endswith("bias") else t + 1 for n, t in adapter.modules.items()}
    adapter = replace(adapter, modules=modules)
    write_peft_adapter(folder, adapter, config=chunk.config.glm5, base_name="base")


def differences_after_start(job: Job, folder: Path) -> list[str]:
    """Parameters that `start_from_adapter` gives other values than `write_adapter` meant."""
    ensure_distributed(default_device(), job.layout)
    run = job.run_config()
    chunks, fresh = (build_trainable(run, hf_folder(run.model.path)) for _ in range(2))
    start_from_adapter(chunks, folder)
    wrong = []
    for chunk, other in zip(chunks, fresh, strict=True):
        randomise_adapters(other)
        pairs = zip(chunk.named_parameters(), other.parameters(), strict=True)
        for (name, got), meant in pairs:
            added = float(meant.requires_grad and not is_adapter(name))
            if not torch.equal(got, meant + added):
                wrong.append(name)
    return wrong


def randomise_adapters(model: GPTModel, factor: Callable[[str], float] = lambda path: 1.0) -> None:
    """B != 0 from the module's global name: while B is zero, A has no gradient."""
    global_name = GlobalNames(model)
    for path, module in adapted_modules(model):
        parts, part = 1, 0
        if module.split == "column":
            parts, part = module.ranks.size(), module.ranks.rank()
        for one, hf_linear, pair in module.factors(path):
            # experts that share B share its name
            shared = module.pairs[hf_linear].b.ndim == 3 and module.pairs[hf_linear].shares["b"]
            name = f"{global_name(path if shared else one)}.{hf_linear}"
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
            generator = torch.Generator().manual_seed(seed)
            whole = 0.1 * torch.randn(pair.b.shape[0] * parts, pair.b.shape[1], generator=generator)
            pair.b.data.copy_(factor(name) * whole.chunk(parts)[part])
