"""What the probe finds of each supported release, and what it says of any other."""

from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexer

from glm5.errors import BackendError, MegatronCoreError
from glm5.ops.backends import get_backend
from glm5.runtime.megatron_core import probe_core

pytestmark = pytest.mark.cores

OLD = {
    "spec_parts": "ModuleSpec",
    "mtp_layer": "mtp_model_layer",
    "dsa_attention": "MLASelfAttention",
    "dsa_in_block_specs": False,
    "fuse_input_layernorm": None,
    "latent_norms": "fused",
    "indexer_rope": "last",
    "dsa_functions": False,
    "tilelang_kernels": False,
}
NEWER = {"spec_parts": "function", "dsa_in_block_specs": True, "fuse_input_layernorm": False}
NEWEST = {
    "dsa_attention": "AbsorbedMLASelfAttention",
    "latent_norms": "own",
    "indexer_rope": "first",
    "dsa_functions": True,
    "tilelang_kernels": True,
}
EXPECTED = {
    "0.16": OLD | {"mtp_layer": "transformer_layer"},
    "0.17": OLD,
    "0.18": OLD | NEWER,
    "0.19": OLD | NEWER | NEWEST,
}


@pytest.fixture
def _asks_again() -> Iterator[None]:
    probe_core.cache_clear()
    yield
    probe_core.cache_clear()


def test_the_installed_release_is_known() -> None:
    number = version("megatron-core")
    assert megatron.core.__version__.partition("+")[0] == number
    expected = EXPECTED[number.rpartition(".")[0]]
    assert asdict(probe_core()) == {"version": number} | expected


@pytest.mark.usefixtures("_asks_again")
@pytest.mark.parametrize(
    ("turned", "got"),
    [
        (lambda self, x, *args: x, "rotates"),
        (lambda self, x, *args: x + 1, "rotates"),
        (lambda self, x, *args: x + torch.tensor([1.0, 0, 0, 1]), "rotates"),
        (lambda self, x, one_argument_less: x, "TypeError"),
        (None, "AttributeError"),
    ],
)
def test_another_indexer_is_refused(monkeypatch: pytest.MonkeyPatch, turned: Any, got: str) -> None:
    if turned is None:
        monkeypatch.delattr(DSAIndexer, "_apply_rope")
    else:
        monkeypatch.setattr(DSAIndexer, "_apply_rope", turned)
    with pytest.raises(MegatronCoreError, match="not one whose") as caught:
        probe_core()
    error = caught.value
    assert got in str(error.got) and version("megatron-core") in str(error.got)
    assert "0.16" in str(error.expected) and "pip install" in str(error.remedy)


def test_the_backend_of_megatrons_functions_runs_or_says_what_is_missing() -> None:
    if probe_core().dsa_functions:
        assert get_backend("megatron") is not None
        return
    with pytest.raises(BackendError, match="'megatron' cannot run here") as caught:
        get_backend("megatron")
    error = caught.value
    assert "dsa_functions" in str(error.got) and version("megatron-core") in str(error.got)
    assert "0.19" in str(error.expected) and '"torch"' in str(error.remedy)


def test_the_backend_of_megatrons_kernels_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if probe_core().tilelang_kernels:
        pytest.skip("this release has them")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(BackendError, match="'tilelang' cannot run here") as caught:
        get_backend("tilelang")
    assert "tilelang_kernels" in str(caught.value.got)
