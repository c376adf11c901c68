"""Parts import only parts below them, so that an arrow never points back."""

import ast
from collections.abc import Iterator
from pathlib import Path

import glm5

SRC = Path(glm5.__file__).parent
# Parts of one row do not know of each other.
ROWS = (
    ("errors", "__version__"),
    ("config_file", "config_rules"),
    ("config", "runtime"),
    ("ops",),
    ("model", "bench"),
    ("lora",),
    ("checkpoint",),
    ("parity",),
    ("export", "train"),
    ("plan", "rl"),
    ("node_share",),
    ("cli", "integrations"),
)
HEIGHT = {part: height for height, row in enumerate(ROWS) for part in row}


def imports(source: str) -> Iterator[str]:
    """The parts of glm5 that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "glm5":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            yield from (name.split(".")[1] for name in names if name.startswith("glm5."))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (name.split(".")[1] for name in names if name.startswith("glm5."))


def test_imports_point_down() -> None:
    files = [path for path in SRC.rglob("*.py") if not path.name.startswith("__")]
    wrong = [
        f"{path.relative_to(SRC)} imports {other}"
        for path in files
        for other in imports(path.read_text())
        if other != (part := path.relative_to(SRC).parts[0].removesuffix(".py"))
        and HEIGHT[other] >= HEIGHT[part]
    ]
    assert len(files) > 100
    assert not wrong


def test_every_import_is_seen() -> None:
    source = (
        "import glm5.ops.rope\nfrom glm5 import cli\ndef f():\n    from glm5.train.run import x\n"
    )
    assert sorted(imports(source)) == ["cli", "ops", "train"]
