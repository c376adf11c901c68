"""From one form of adapter folder to another, verified by reading back."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from glm5.checkpoint.adapter import (
    ExpertLora,
    LoraAdapter,
    factor_specs,
    without_linears,
)
from glm5.checkpoint.adapter_compare import compare_adapters
from glm5.checkpoint.adapter_engines import Consumer
from glm5.checkpoint.adapter_file import Progress
from glm5.checkpoint.adapter_read import AdapterForm, read_adapter, read_form
from glm5.checkpoint.adapter_serving import ServingReport, write_serving_adapter
from glm5.checkpoint.adapter_serving_check import check_serving_adapter
from glm5.checkpoint.adapter_settings import AdapterSettings
from glm5.checkpoint.adapter_write import write_peft_adapter
from glm5.checkpoint.atomic import check_is_free, new_folder
from glm5.config import Glm5Config
from glm5.errors import AdapterError


@dataclass(frozen=True, slots=True)
class Conversion:
    """What a conversion read, wrote and found."""

    read_as: AdapterForm
    expert_lora: ExpertLora
    """Of what was written."""
    num_linears: int
    max_rank: int
    error: float
    """Largest error of scale * b of a linear, relative to its largest element; 0: none rounded."""
    serving: ServingReport | None
    """None for PEFT."""


def convert_adapter(
    source: str | Path,
    target: str | Path,
    to: Consumer,
    config: Glm5Config,
    *,
    base_name: str,
    read_as: Consumer | None = None,
    expert_lora: ExpertLora | None = None,
    without: Collection[str] = (),
    progress: Progress = lambda done, total: None,
) -> Conversion:
    """Write the adapter of the folder `source` to the new folder `target` as `to` loads it.

    read_as: None: as the folder looks; an engine: `check_serving_adapter` must pass first.
    expert_lora: "per_expert" gives the experts of a "shared_outer" adapter factors of their own,
    exactly; PEFT's form always does. without: linears that are left out, by their last name.
    base_name: what the settings name as base model where the source names none.
    The pairs stream; what was written is read back and compared before the folder appears.

    Raises AdapterError for whatever the reader and the writer refuse and for a layout that the
    adapter does not have, CheckpointError for a target in use, and CheckFailedError where what was
    read back is another adapter.
    """
    source = Path(source)
    check_is_free(Path(target))
    if read_as in ("sglang", "vllm"):
        check_serving_adapter(source, read_as, config)
    form = read_form(source) if read_as is None else "peft" if read_as == "peft" else "serving"
    adapter = read_adapter(source, config, form)
    adapter = _laid_out(_reduced(adapter, without), expert_lora)
    _check_adapts(source, adapter)
    base_name = AdapterSettings.read(source).base_model_name_or_path or base_name
    with new_folder(target) as staging:
        folder = staging / "adapter"
        serving = None
        if to == "peft":
            adapter = _laid_out(adapter, None if adapter.expert_lora == "none" else "per_expert")
            write_peft_adapter(
                folder, adapter, config=config, base_name=base_name, progress=progress
            )
        else:
            serving = write_serving_adapter(
                folder, adapter, to, config=config, base_name=base_name, progress=progress
            )
        written = read_adapter(folder, config, "peft" if to == "peft" else "serving")
        error, _ = compare_adapters(written, adapter)
        for file in folder.iterdir():
            file.rename(staging / file.name)
        folder.rmdir()
    ranks = [spec.rank for spec in factor_specs(adapter.factors).values()]
    return Conversion(form, adapter.expert_lora, len(ranks), max(ranks), error, serving)


def _check_adapts(source: Path, adapter: LoraAdapter) -> None:
    """What is all zero would be read back as no adapter; no linears at all the writers refuse."""
    pairs = adapter.factors
    if pairs and not any(pair.a.any() or pair.b.any() for pair in pairs.values()):
        raise AdapterError(
            f"{source} holds zeros only, in the linears that are to be written",
            expected="factors that are not zero, of one linear at least",
            remedy="export a trained adapter",
        )


def _reduced(adapter: LoraAdapter, without: Collection[str]) -> LoraAdapter:
    if not without:
        return adapter
    names = {path.rpartition(".")[2] for path in factor_specs(adapter.factors)}
    if unknown := sorted(set(without) - names):
        raise AdapterError(
            "the adapter has no such linears to leave out",
            got=", ".join(unknown),
            expected=f"some of {', '.join(sorted(names))}",
        )
    return without_linears(adapter, without)


def _laid_out(adapter: LoraAdapter, expert_lora: ExpertLora | None) -> LoraAdapter:
    """The adapter in the layout that is asked for; None: its own."""
    if expert_lora is None or expert_lora == adapter.expert_lora:
        return adapter
    if (adapter.expert_lora, expert_lora) == ("shared_outer", "per_expert"):
        # every expert's pair is complete: only the word changes
        return replace(adapter, expert_lora="per_expert")
    raise AdapterError(
        f'an adapter with expert_lora = "{adapter.expert_lora}" cannot be written as '
        f'"{expert_lora}"',
        got="factors of their own on both sides of every expert"
        if adapter.expert_lora == "per_expert"
        else "no adapted routed experts",
        expected='"shared_outer" has one outer factor for all experts of a layer: most per-expert '
        "adapters have no such form, and an approximation would be another model"
        if expert_lora == "shared_outer"
        else None,
        remedy="leave --expert-lora out, or train with that layout",
    )
