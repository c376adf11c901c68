"""Walk an adapter folder as the loader of an engine does, and refuse what it would not take."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

from glm5.checkpoint.adapter import is_expert
from glm5.checkpoint.adapter_engines import PARTNERS, UNREAD, Engine, check_rank, check_servable
from glm5.checkpoint.adapter_file import AdapterFile
from glm5.checkpoint.adapter_keys import PREFIX, STACKED_NAMES, AdapterKeys, expert_path, sort_keys
from glm5.checkpoint.adapter_layout import MLP_TARGETS, adapter_linears
from glm5.checkpoint.adapter_settings import AdapterSettings
from glm5.checkpoint.names import summarise
from glm5.config import Glm5Config
from glm5.errors import AdapterError


def check_serving_adapter(folder: str | Path, engine: Engine, config: Glm5Config) -> None:
    """Refuse a folder of which the engine would fill, drop or reject any part.

    Settings: one r, one lora_alpha, a list of linear names; use_rslora for vllm alone. Tensors:
    known linears of the decoder alone, in one of the float dtypes; A [r, in] and B [out, r] of
    each; what the engine fuses is complete (q_a_proj with kv_a_proj_with_mqa, gate_proj with
    up_proj, every expert of a layer); experts are 2-D one by one, or 3-D with the outer sides
    shared, never both. Values are not read.

    Raises AdapterError naming what is wrong.
    """
    folder = Path(folder)
    settings = AdapterSettings.read(folder)
    file = AdapterFile(folder)
    check = _Check(folder, settings, file, engine, config)
    check.settings()
    check.names()
    check.shapes()
    check.partners()
    check.experts()
    check.targets()


class _Check:
    def __init__(
        self,
        folder: Path,
        settings: AdapterSettings,
        file: AdapterFile,
        engine: Engine,
        config: Glm5Config,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._file = file
        self._engine = engine
        self._num_experts = config.n_routed_experts
        self._linears = adapter_linears(config)
        self._keys: AdapterKeys = sort_keys(file.names())

    def settings(self) -> None:
        """One rank and one alpha, and nothing that the engine would not read."""
        for name in UNREAD[self._engine]:
            if getattr(self._settings, name):
                self._refuse(f"{name}, which {self._engine} does not read", "plain LoRA settings")
        if self._settings.lora_alpha <= 0:
            self._refuse(f"lora_alpha = {self._settings.lora_alpha}", "a positive one")
        check_rank(self._settings.r, self._engine)

    def names(self) -> None:
        """Known linears, each with both of its factors, under one spelling."""
        names = self._file.names()
        if not names:
            self._refuse("no tensors", "lora_A and lora_B of at least one linear")
        self._none(self._keys.fused.keys(), "experts as PEFT fuses them", "one by one, or w1 to w3")
        self._none(self._keys.other.values(), "tensors that are no factors", "lora_A and lora_B")
        prefixed = [name for name in names if name.startswith(PREFIX)]
        if prefixed and len(prefixed) < len(names):
            self._none(prefixed, f"names with and without {PREFIX}", "one or the other")
        if self._engine == "vllm":
            self._none(set(names) - set(prefixed), f"names without {PREFIX}", "names with it")
        unknown = [path for path in self._paths() if path not in self._linears]
        self._none(unknown, "linears that this model's decoder does not have", "others")
        for kind in (self._keys.linears, self._keys.stacked):
            half = [path for path, sides in kind.items() if len(sides) < 2]
            self._none(half, "half of a pair", "lora_A and lora_B")
        check_servable(self._paths(), self._engine)

    def shapes(self) -> None:
        """A [r, in] and B [out, r], in one float dtype."""
        dtypes = {self._file.dtype(name) for name in self._file.names()}
        if len(dtypes) > 1:
            self._refuse(f"several dtypes: {sorted(map(str, dtypes))}", "one for all tensors")
        for path, sides in self._keys.linears.items():
            self._shape(sides, path, ((), ()))
        for stacked, sides in self._keys.stacked.items():
            experts = (self._num_experts,)
            shared_last = stacked.endswith("down_proj")
            outer = (experts, (1,)) if shared_last else ((1,), experts)
            self._shape(sides, expert_path(stacked, 0), outer)

    def partners(self) -> None:
        """What is loaded into one buffer is all there."""
        linears = self._keys.linears
        for path in linears:
            parent, _, leaf = path.rpartition(".")
            partner = f"{parent}.{PARTNERS.get(leaf, leaf)}"
            if partner not in linears and not is_expert(path):
                self._refuse(f"{path} without {partner}", "both; zeros for what is not adapted")

    def experts(self) -> None:
        """Every projection of every expert of a layer, in one of two layouts."""
        apart = {path.rsplit(".", 2)[0] for path in self._keys.linears if is_expert(path)}
        stacked = {path.rpartition(".")[0] for path in self._keys.stacked}
        if apart and stacked:
            self._refuse("experts in 2-D tensors beside others in 3-D ones", "one layout")
        wanted = {
            f"{owner}.{expert}.{leaf}"
            for owner in apart
            for expert in range(self._num_experts)
            for leaf in MLP_TARGETS
        }
        self._none(wanted - self._keys.linears.keys(), "some experts of a layer, without", "all")
        wanted = {f"{owner}.{leaf}" for owner in stacked for leaf in MLP_TARGETS}
        self._none(wanted - self._keys.stacked.keys(), "some of w1, w2, w3, without", "all three")
        if self._engine == "vllm":
            self._vllm_names()

    def targets(self) -> None:
        """target_modules lists the linears of the file by their last name."""
        targets = self._settings.target_modules
        if targets is None or isinstance(targets, str):
            self._refuse(f"target_modules = {targets!r}", "a list of linear names")
        leaves = {path.rpartition(".")[2] for path in self._paths()}
        if set(targets) != leaves:
            self._refuse(f"target_modules = {sorted(targets)}", f"{sorted(leaves)}, as the file")

    def _vllm_names(self) -> None:
        """Experts one by one by Hugging Face names, and together as w1, w2, w3."""
        for kind, leaves in (
            (self._keys.linears, MLP_TARGETS),
            (self._keys.stacked, tuple(STACKED_NAMES.values())),
        ):
            names = [
                name
                for path, sides in kind.items()
                if ".mlp.experts." in path
                for name in sides.values()
                if name.split(".")[-3] not in leaves
            ]
            self._none(names, "experts by names that vllm does not map", f"{', '.join(leaves)}")

    def _paths(self) -> list[str]:
        stacked = [expert_path(path, 0) for path in self._keys.stacked]
        return [*self._keys.linears, *stacked]

    def _shape(
        self, sides: Mapping[str, str], path: str, outer: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> None:
        out_features, in_features = self._linears[path]
        rank = self._settings.r
        for side, dims, own in zip(
            "AB", outer, ((rank, in_features), (out_features, rank)), strict=True
        ):
            name, expected = sides[side], (*dims, *own)
            if self._file.shape(name) != expected:
                self._refuse(f"{name} of shape {self._file.shape(name)}", f"{expected}")

    def _none(self, names: Iterable[str], what: str, expected: str) -> None:
        names = list(names)
        if names:
            self._refuse(f"{what}: {summarise(names)}", expected)

    def _refuse(self, got: str, expected: str) -> NoReturn:
        raise AdapterError(
            f"{self._engine} would not serve all of {self._folder}",
            got=got,
            expected=expected,
            remedy=f"write it with `glm5 convert-adapter --to {self._engine}`",
        )
