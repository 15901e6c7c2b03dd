"""From data to a page. Data is text of anyone's: it reaches the page as JSON and is shown as text, never as markup.

A content security policy names the page's own scripts by their digests, so that nothing else in it could run, and
allows no address but those of pictures inside it.
"""

import base64
import hashlib
import importlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from ..core.errors import InputError, first_line
from ..run.folder import is_report
from ..run.paths import REPORT
from ..tools.files import kind_of, write_atomically
from .data import run_data

STATIC = Path(__file__).parent / "static"
COMMON_SCRIPTS = ("vendor/d3.min.js", "vendor/plot.umd.min.js", "common.js", "charts.js")
COMPARISON = "compare.json"
"""The file that tells a comparison's folder."""
COMPARISON_DATA = "arborl.compare.page", "comparison_data"
"""The function that reads it, by name, as it stands further along the data path."""
BROKEN = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError)
"""What Python raises over a comparison's file that is not what was written."""
PAGE_SCRIPTS = {"run": ("tree.js", "pictures.js", "run.js"), "comparison": ("comparison.js",)}


def read(folder: Path) -> dict[str, Any]:
    """Data of the page of a run's folder, or of a comparison's."""
    if (folder / COMPARISON).is_file():
        module, name = COMPARISON_DATA
        try:
            return getattr(importlib.import_module(module), name)(folder)
        except InputError:
            raise
        except BROKEN as error:
            problem = f"cannot be read ({type(error).__name__}: {first_line(error)})"
            cure = "the same arborl compare again, which makes it anew from the runs that are there"
            raise InputError("comparison", folder / COMPARISON, problem, cure=cure) from error
    return run_data(folder)


def write_report(folder: Path, to: Path | None = None, summary: Mapping[str, Any] | None = None) -> Path:
    """Write the page of a run or a comparison, into its folder if nothing else is said; complete or not at all.

    It takes the place of an earlier one, but of no other file. `summary` is what a run that is about to finish came to.
    """
    place = to or folder / REPORT
    beside = place.resolve().parent == folder.resolve()  # so that links to other pages in it lead there
    try:
        check_can_write(place)
        data = read(folder) | {"linked": beside}
        write_atomically(place, render(data | ({"finished": True, "summary": dict(summary)} if summary else {})))
    except OSError as error:
        raise InputError("--out", place, f"cannot be written ({error.strerror})") from None
    return place


def check_can_write(place: Path) -> None:
    """A page takes no other file's place."""
    kind = kind_of(place)
    if kind and not is_report(place):
        problem = "is there already, and no report" if kind == "file" else f"cannot be written (a {kind} is there)"
        raise InputError("--out", place, problem, cure="another file")


def render(data: dict[str, Any], live: bool = False) -> str:
    """A whole page: everything it needs is inside it."""
    scripts = [_static(name) for name in (*COMMON_SCRIPTS, *PAGE_SCRIPTS[data["kind"]])]
    digests = " ".join(f"'sha256-{digest(script)}'" for script in scripts)
    policy = {"default-src": "'none'", "img-src": "data:", "style-src": "'unsafe-inline'", "script-src": digests}
    policy |= {"connect-src": "'self'" if live else "'none'", "base-uri": "'none'", "form-action": "'none'"}
    return _template().render(
        data=data,
        live=live,
        policy="; ".join(f"{name} {sources}" for name, sources in policy.items()),
        style=_static("report.css"),
        scripts=scripts,
    )


@cache
def digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


@cache
def _static(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(STATIC), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False, "allow_nan": False, "separators": (",", ":")}
    return environment.get_template("page.html")
