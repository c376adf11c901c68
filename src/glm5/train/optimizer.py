"""Megatron-Core's DDP wrapper, optimiser and learning-rate schedule for a run."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from glm5.runtime.distributed import has_gloo_groups
from glm5.train.sections import OptimizerSection


def wrap_data_parallel(chunks: Sequence[GPTModel]) -> list[DistributedDataParallel]:
    """Gives trainable parameters fp32 gradient buffers; frozen ones get no gradient memory."""
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    return [DistributedDataParallel(chunk.config, config, chunk) for chunk in chunks]


def build_optimizer(
    chunks: Sequence[DistributedDataParallel], section: OptimizerSection
) -> ChainedOptimizer:
    """AdamW over the trainable parameters, with fp32 copies of bf16 ones.

    Moments and copies are shared out over the ranks that hold the same parameters: with d of them
    each keeps 12 / d bytes per parameter (arXiv 1910.02054, stage 1).
    """
    model_config = chunks[0].module.config
    config = OptimizerConfig(
        optimizer="adam",
        lr=section.lr,
        min_lr=section.min_lr,
        weight_decay=section.weight_decay,
        adam_beta1=section.beta1,
        adam_beta2=section.beta2,
        adam_eps=section.eps,
        clip_grad=section.clip_grad,
        bf16=model_config.bf16,
        params_dtype=model_config.params_dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(
        config, list(chunks), use_gloo_process_groups=has_gloo_groups()
    )
    assert isinstance(optimizer, ChainedOptimizer)
    return optimizer


def build_scheduler(
    optimizer: ChainedOptimizer, section: OptimizerSection, steps: int
) -> OptimizerParamScheduler:
    """Step k (from 0) has the rate of k steps done: from 0 up to lr, then down towards min_lr.

    Weight decay stays constant.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=section.lr,
        min_lr=section.min_lr,
        lr_warmup_steps=section.warmup_steps,
        lr_decay_steps=steps,
        lr_decay_style=section.schedule,
        start_wd=section.weight_decay,
        end_wd=section.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        # the number of steps may be raised when a run resumes
        override_opt_param_scheduler=True,
        use_checkpoint_opt_param_scheduler=False,
    )
