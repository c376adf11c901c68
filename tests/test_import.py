"""`import glm5` stays light, and its public names resolve on first use."""

import subprocess
import sys
from pathlib import Path

import pytest

import glm5

HEAVY = ("torch", "transformers", "megatron", "pydantic", "numpy", "huggingface_hub")
SRC = Path(glm5.__file__).parents[1]


def loaded_after(code: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after running `code`."""
    report = f"import sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    script = f"import sys; sys.path.insert(0, {str(SRC)!r})\n{code}\n{report}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_import_loads_nothing_heavy() -> None:
    assert loaded_after("import glm5; glm5.__version__; dir(glm5)") == set()


def test_reading_a_config_needs_no_torch() -> None:
    loaded = loaded_after("from glm5 import Glm5Config")
    assert loaded == {"pydantic"}


def test_the_check_sees_a_heavy_import() -> None:
    assert "numpy" in loaded_after("import glm5, numpy")


@pytest.mark.parametrize("name", glm5.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(glm5, name) is not None
    assert name in dir(glm5)


def test_all_lists_every_lazy_name() -> None:
    assert set(glm5.__all__) == {"__version__", *glm5._HOMES}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Glm6Config'"):
        glm5.Glm6Config  # noqa: B018
