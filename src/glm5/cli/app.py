"""`glm5` and its verbs; heavy packages are imported by the verb that needs them."""

from __future__ import annotations

from typing import Annotated

import typer

from glm5.cli.checkpoint_verbs import convert, convert_adapter, convert_core, export
from glm5.cli.model_verbs import demo, doctor, tiny, train, verify
from glm5.cli.planning_verbs import kernels, node_share, plan

app = typer.Typer(
    name="glm5",
    help="LoRA and full fine-tuning of the GLM-5 family on Megatron-Core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        from glm5 import __version__

        print(f"glm5 {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    del version  # the callback has seen it


bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")

# in the order in which `glm5 --help` lists them
app.command()(demo)
app.command()(tiny)
app.command()(verify)
app.command()(convert)
app.command()(train)
app.command()(export)
app.command("convert-core")(convert_core)
app.command("convert-adapter")(convert_adapter)
app.command()(plan)
app.command()(doctor)
bench.command()(kernels)
bench.command("node-share")(node_share)
