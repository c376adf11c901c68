"""Read an adapter folder that glm5, PEFT or an engine's exporter wrote, one pair per linear."""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal

from glm5.checkpoint.adapter import ExpertLora, Lazy, LoraAdapter, is_expert
from glm5.checkpoint.adapter_engines import UNREAD
from glm5.checkpoint.adapter_file import AdapterFile
from glm5.checkpoint.adapter_keys import expert_path, sort_keys
from glm5.checkpoint.adapter_layout import (
    MLP_TARGETS,
    adapter_linears,
    fused_weight,
    is_mtp,
    module_tensors,
    peft_keys,
    weight_shapes,
)
from glm5.checkpoint.adapter_places import AdapterPlaces, Side
from glm5.checkpoint.adapter_settings import AdapterSettings
from glm5.checkpoint.names import summarise
from glm5.config import Glm5Config
from glm5.errors import AdapterError

AdapterForm = Literal["peft", "serving"]


def read_adapter(
    folder: str | Path, config: Glm5Config, form: AdapterForm | None = None
) -> LoraAdapter:
    """Read a PEFT folder, or one in the layouts that SGLang and vLLM serve; None: as it looks,
    refused where that leaves open what its settings mean.

    Factors stay on disk until they are asked for, in the file's dtype, on the CPU; the inverse of
    the writers, bitwise where they pad and rescale nothing. Linears whose a and b are all zero are
    left out where a writer may have filled them in: inside PEFT's fused experts, and everywhere in
    a serving folder. Of a folder that PEFT trained, a fused gate and up share one a: both get it.

    Experts may lie fused (PEFT on transformers >= 5), one pair per expert (also what PEFT wrote on
    transformers 4), or stacked in 3-D tensors, one side of which may be shared ("shared_outer").

    Raises AdapterError for a folder that is incomplete, not of this model, not safetensors
    (nothing is unpickled), or more than LoRA and whole router, norm, embedding and head tensors:
    DoRA, biases, a low-rank router, and the like.
    """
    folder = Path(folder)
    settings = AdapterSettings.read(folder)
    file = AdapterFile(folder)
    reader = _Reader(file, settings, config)
    if (form or _form(folder, settings)) == "peft":
        return reader.read_peft()
    return reader.read_serving()


def read_form(folder: Path) -> AdapterForm:
    """The form that a folder looks like; AdapterError where its readers would read it apart."""
    return _form(folder, AdapterSettings.read(folder))


def _form(folder: Path, settings: AdapterSettings) -> AdapterForm:
    # PEFT writes all of its settings; exporters for engines write the few that those read
    of_peft = {"inference_mode", "modules_to_save", "target_parameters"}
    if settings.model_fields_set & of_peft:
        return "peft"
    unread = {name for names in UNREAD.values() for name in names}
    if told_apart := sorted(name for name in unread if getattr(settings, name)):
        raise AdapterError(
            f"{folder} does not tell what it is for, and not every engine reads its settings",
            got=", ".join(told_apart),
            expected="settings of PEFT's own, or r and lora_alpha alone",
            remedy="name what serves it: `glm5 convert-adapter --from sglang`, `--from vllm` or "
            "`--from peft`",
        )
    return "serving"


class _Reader:
    def __init__(self, file: AdapterFile, settings: AdapterSettings, config: Glm5Config) -> None:
        self._file = file
        self._settings = settings
        self._config = config
        self._linears = adapter_linears(config)
        self._places = AdapterPlaces(file, config.n_routed_experts)
        self._keys = sort_keys(file.names())

    def read_peft(self) -> LoraAdapter:
        self._check_none(self._keys.stacked, "stacked experts, which PEFT does not load")
        self._check_modules()
        keys = peft_keys(self._settings.weights(self._linears))
        found = set(self._file.names()) - set(self._keys.other.values())
        self._check_peft_keys(found, keys)
        for weight, key in keys.items():
            names = f"{key}.lora_A.weight", f"{key}.lora_B.weight"
            if names[0] in found:
                self._add_peft(weight, *names)
        return self._adapter("per_expert")

    def read_serving(self) -> LoraAdapter:
        self._check_none(self._keys.fused, "fused experts, which PEFT alone loads")
        self._check_none(
            self._keys.other, "what is not lora_A or lora_B of a linear, or one of them twice"
        )
        self._check_known(self._keys.linears)
        shared = False
        for path, sides in self._serving_sides().items():
            shared = shared or any(side.shared for side in sides.values())
            self._add_serving(path, sides)
        return self._adapter("shared_outer" if shared else "per_expert")

    def _adapter(self, expert_lora: ExpertLora) -> LoraAdapter:
        factors = self._places.factors(self._linears)
        if not factors:
            raise AdapterError(
                f"{self._file.path} holds zeros only", remedy="export a trained adapter"
            )
        has_experts = any(is_expert(path) for path in factors)
        modules = Lazy(self._keys.other, lambda name: self._file.read(self._keys.other[name]))
        return LoraAdapter(factors, expert_lora if has_experts else "none", modules)

    # --- PEFT ---

    def _add_peft(self, weight: str, a: str, b: str) -> None:
        rank, scale = self._settings.rank(weight), self._settings.scale(weight)
        experts = self._config.n_routed_experts
        shapes = weight_shapes(weight, self._linears, rank=rank, num_experts=experts)
        for name, shape in zip((a, b), shapes, strict=True):
            self._check_shape(name, shape)
        if fused := fused_weight(weight):
            own_ranks = rank == len(fused.projections) * self._settings.r
            self._places.add_fused(fused, a, b, scale, own_ranks=own_ranks)
        else:
            path = weight.removesuffix(".weight")
            self._places.add_pair(path, Side(a), Side(b), scale, drop_zero=False)

    def _check_modules(self) -> None:
        known = module_tensors(self._config) if self._keys.other else {}
        for name in self._keys.other:
            if name not in known or not self._settings.saves_module(name):
                raise AdapterError(
                    f"{self._file.path} holds tensors that belong to no target",
                    got=name,
                    expected="factors of linears; router, norms, embeddings and lm_head where "
                    "modules_to_save names them",
                    remedy="merge this adapter with PEFT and use the merged model",
                )
            self._check_shape(self._keys.other[name], known[name])

    def _check_peft_keys(self, found: set[str], keys: Mapping[str, str]) -> None:
        self._check_known(self._keys.linears)
        names = {f"{key}.lora_{x}.weight": weight for weight, key in keys.items() for x in "AB"}
        # transformers 5 has no such modules: PEFT adapts the routed experts alone by these names
        ambiguous = {name for name, weight in names.items() if weight.endswith(MLP_TARGETS)}
        half = {name for name in ambiguous - found if _other_side(name) in found}
        for what, wrong in (
            ("lacks tensors that its targets ask for", (names.keys() - found - ambiguous) | half),
            ("holds tensors that belong to no target", found - names.keys()),
        ):
            if wrong:
                raise AdapterError(
                    f"{self._file.path} {what}",
                    got=summarise(wrong),
                    expected="lora_A and lora_B of each targeted linear of this model",
                    remedy="use the adapter_config.json and the base model that belong to the file",
                )

    # --- engines ---

    def _serving_sides(self) -> dict[str, dict[str, Side]]:
        """(A and B) of every linear, wherever they lie."""
        sides = {
            path: {side: Side(name) for side, name in names.items()}
            for path, names in self._keys.linears.items()
        }
        for stacked, names in self._keys.stacked.items():
            for side, name in names.items():
                shared = self._is_shared(stacked, side, name)
                for expert in range(self._config.n_routed_experts):
                    own = sides.setdefault(expert_path(stacked, expert), {})
                    if side in own:
                        self._check_none([name, own[side].name], "an expert's factor twice")
                    own[side] = Side(name, 0 if shared else expert, shared)
        return sides

    def _is_shared(self, stacked: str, side: str, name: str) -> bool:
        """Whether a 3-D tensor holds one factor for all experts of its layer."""
        shape = self._file.shape(name)
        may_be_shared = side == ("B" if stacked.endswith("down_proj") else "A")
        self._check_known([expert_path(stacked, 0)])
        sizes = {self._config.n_routed_experts} | ({1} if may_be_shared else set())
        if len(shape) != 3 or shape[0] not in sizes:
            raise AdapterError(
                f"{name} does not fit this model",
                got=shape,
                expected=f"{self._config.n_routed_experts} experts"
                + (", or 1 for what they share" if may_be_shared else "")
                + " x 2 dimensions",
            )
        return shape[0] == 1

    def _add_serving(self, path: str, sides: Mapping[str, Side]) -> None:
        if len(sides) != 2:
            raise AdapterError(
                f"{self._file.path} lacks half of a pair",
                got=f"{path} has lora_{''.join(sides)} alone",
                expected="lora_A and lora_B",
                remedy="write the folder again",
            )
        rank = self._settings.rank(path)
        out_features, in_features = self._linears[path]
        for side, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
            name, row, _ = sides[side]
            stacked = () if row is None else (self._file.shape(name)[0],)
            self._check_shape(name, (*stacked, *shape))
        scale = self._settings.scale(path)
        self._places.add_pair(path, sides["A"], sides["B"], scale, drop_zero=True)

    # --- both ---

    def _check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        if self._file.shape(name) != shape:
            raise AdapterError(
                f"{name} does not fit this model",
                got=self._file.shape(name),
                expected=shape,
                remedy="use the adapter_config.json and the base model that belong to the file",
            )

    def _check_none(self, names: Collection[str], what: str) -> None:
        if names:
            raise AdapterError(
                f"{self._file.path} holds {what}",
                got=summarise(names),
                remedy="name the form that the folder is in, or write it again",
            )

    def _check_known(self, paths: Iterable[str]) -> None:
        unknown = [path for path in paths if path not in self._linears]
        if not unknown:
            return
        why = "use the base model that belongs to the adapter"
        if any(path.endswith("mlp.gate") for path in unknown):
            why = "a low-rank router is not supported: merge this adapter with PEFT, or train the "
            why += "router whole (modules_to_save)"
        elif any(is_mtp(path, self._config) for path in unknown):
            why = "leave the MTP layer out: nothing loads adapters on it"
        raise AdapterError(
            f"{self._file.path} adapts what this model does not have, or not by factors",
            got=summarise(unknown),
            remedy=why,
        )


def _other_side(name: str) -> str:
    side = "lora_B" if ".lora_A." in name else "lora_A"
    return name.replace(".lora_A." if side == "lora_B" else ".lora_B.", f".{side}.")
