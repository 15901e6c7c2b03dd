"""The command line, a file for each few commands. Errors a user can mend are one line and exit code 2."""

import os
import sys
import traceback
from typing import NoReturn

import click

from ..core.errors import InputError, first_line
from ..tools.output import tolerant_output
from . import compare, models, pages, rewards, training, weights  # noqa: F401 (each adds its commands to the app)
from .app import app
from .exits import exit_with_launcher, is_lost_connection, leave, one_line, ranks_connected, settle


def main(arguments: list[str] | None = None) -> None:
    """Entry point: runs a command, whether or not somebody reads what it prints to its end."""
    with tolerant_output():
        try:
            _run(arguments)
        except SystemExit as ending:
            sys.exit(settle(ending.code) if isinstance(ending.code, int) else ending.code)


def _check_launcher() -> None:
    """What a launcher says of its processes is numbers, or as good as not there where it is empty."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        if not (text := os.environ.get(name, "0").strip()):
            del os.environ[name]
        elif not (text.isascii() and text.isdecimal()):
            click.echo(f"error: {InputError(name, text, 'is no number', 'what a launcher sets, or nothing')}", err=True)
            sys.exit(2)


def _run(arguments: list[str] | None) -> NoReturn:
    """A command, with one line for what a user can mend."""
    _check_launcher()
    rank, several = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")) > 1
    on = f" on rank {rank}" if rank else ""
    if several:
        exit_with_launcher()
    try:
        sys.exit(app.main(arguments, prog_name="arborl", standalone_mode=False) or 0)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "arborl"
        text = one_line(error.format_message())
        click.echo(f"error: {text}{'' if text.endswith('?') else ';'} see: {command} -h", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        click.echo(f"error: {one_line(error.format_message())}", err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        click.echo("stopped", err=True)
        sys.exit(130)
    except InputError as error:
        # Before the ranks meet every one finds what is wrong with the settings: one on each machine says so. Later only
        # those come here whose error nobody else has told.
        if ranks_connected() or os.environ.get("LOCAL_RANK", "0") == "0":
            click.echo(f"error{on}: {error}", err=True)
        leave(2)
    except Exception as error:
        if not several:
            raise
        from ..distributed.coordination import OtherRankFailed

        if isinstance(error, OtherRankFailed):
            click.echo(f"stopped{on}: {error}", err=True)
        elif is_lost_connection(error):
            click.echo(f"stopped{on}: another process is gone ({first_line(error)})", err=True)
        else:
            traceback.print_exc()
        leave(1)
