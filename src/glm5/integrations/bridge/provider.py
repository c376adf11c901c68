"""Megatron-Bridge's model provider of a GLM-5 model, which is the model's config, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from megatron.bridge.models.mla_provider import MLAModelProvider

from glm5.config import Glm5Config
from glm5.errors import ConfigError
from glm5.integrations.bridge.initialise import initialise
from glm5.integrations.bridge.model import BridgedModel
from glm5.integrations.bridge.provider_check import check_pipeline, check_provider
from glm5.model.build import build_stage
from glm5.model.schedule import pipeline_layout
from glm5.model.spec import decoder_spec
from glm5.model.transformer_config import (
    Glm5Settings,
    architecture,
    megatron_kernels,
    router_choices,
    torch_dtype,
)
from glm5.ops.backends import default_backend

# Megatron's ways to say which layers stand on which pipeline stage.
_SPLITS = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)


@dataclass
class GLM5ModelProvider(Glm5Settings, MLAModelProvider):
    """Builds a rank's stages of a GLM-5 model; every module reads its settings from here.

    `dsa_attention_backend` is any name of glm5.ops.backends. What config.json says cannot be
    changed here: a provider that contradicts `hf_config` does not build.
    """

    hf_config: dict[str, Any] = field(kw_only=True)
    """The raw config.json; a dict, so that Megatron-Bridge can write it into its run config."""

    transformer_layer_spec: Callable[..., Any] = decoder_spec
    """Says which module stands where in a stage, called with the provider and `vp_stage`."""

    @cached_property
    def glm5(self) -> Glm5Config:
        """The model as published; dimensions and the layer schedule are read from it."""
        return Glm5Config.from_hf_dict(self.hf_config)

    def finalize(self) -> None:
        """Megatron's own completion of the config, with stages that IndexShare allows.

        The most even such split is taken where pipeline ranks are asked for and no split is given.

        Raises:
            ConfigError, LayoutError, BackendError: see `check_provider` and `check_pipeline`.
        """
        check_provider(self)
        if self.pipeline_model_parallel_size > 1 and not self._splits_stages():
            stages = self.pipeline_model_parallel_size * (
                self.virtual_pipeline_model_parallel_size or 1
            )
            mtp = bool(self.mtp_num_layers)
            self.pipeline_model_parallel_layout = pipeline_layout(self.glm5, stages, None, mtp=mtp)
        super().finalize()
        check_pipeline(self)

    def provide(
        self,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> BridgedModel:
        """One pipeline stage of this rank, on its device.

        Its weights are drawn where `perform_initialization` is set, and else not set at all: what
        loads a checkpoint checks that all of them are filled.

        Raises:
            ConfigError: it is not finalized.
            ConfigError, LayoutError, BackendError: see `check_provider` and `check_pipeline`.
        """
        self._check_finalized()
        check_provider(self)
        check_pipeline(self)
        model = build_stage(
            self,
            vp_stage,
            model_type=BridgedModel,
            decoder=self.transformer_layer_spec,
            pre_process=pre_process,
            post_process=post_process,
        )
        if self.perform_initialization:
            initialise(model)
        return model

    def _check_finalized(self) -> None:
        if self.init_method is None:
            raise ConfigError(
                "a provider was asked for a model before it was finalized",
                got="provide() without finalize()",
                expected="finalize() after the last field is set, which completes the config",
                remedy="call provider.finalize()",
            )

    def _splits_stages(self) -> bool:
        """Whether somebody has said which layers stand on which stage."""
        said = [getattr(self, name) for name in _SPLITS]
        return any(value not in (None, False) for value in said)


def provider_of(glm5: Glm5Config) -> GLM5ModelProvider:
    """The provider of a configuration, in its dtype, for the device that is here."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch_dtype(glm5.dtype)
    return GLM5ModelProvider(
        hf_config=glm5.hf_raw,
        dsa_attention_backend=default_backend(device.type),
        **architecture(glm5),
        **router_choices(device),
        **megatron_kernels(),
        init_method_std=glm5.initializer_range,
        vocab_size=glm5.vocab_size,
        seq_length=glm5.max_position_embeddings,
        share_embeddings_and_output_weights=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=False,
    )
