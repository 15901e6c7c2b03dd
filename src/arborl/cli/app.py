"""The `arborl` command itself, and the options that its commands share."""

from pathlib import Path

import click
from rich.console import Console

from .. import __version__
from ..config import DEFAULT, presets
from . import completion

out = Console(highlight=False)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Every setting is a KEY=VALUE; docs/config.md lists them. Begin with `arborl plan`, then `arborl train`.",
    invoke_without_command=True,
)
@click.version_option(__version__, prog_name="arborl")
@click.pass_context
def app(context: click.Context) -> None:
    """Reinforcement learning on denoising trees, for diffusion and flow models."""
    if context.invoked_subcommand is None:
        from .suggestions import print_suggestions

        print_suggestions(out)


overrides_argument = click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=completion.settings)
config_option = click.option(
    "--config-name",
    "-c",
    metavar="NAME",
    help=f"Preset ({', '.join(presets())}) or a yaml file of your own.  [default: {DEFAULT}]",
    shell_complete=completion.preset_names,
)
run_option = click.option(
    "--run",
    type=click.Path(path_type=Path),
    shell_complete=completion.run_folders,
    help="Use this run's settings and newest weights; or name a checkpoint in it.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for machines.")
