"""Summary at the end of a run, on the terminal and in summary.json."""

import json
from collections.abc import Callable
from pathlib import Path

from ..core.errors import InputError
from ..engine.state import State
from ..tools.files import write_atomically
from .checkpoint import read_header
from .drawings import cell_of, interleave
from .environment import evaluated_on
from .evaluations import Evaluations
from .folder import seconds_by_stage
from .logger import Logger
from .paths import BEFORE_AFTER, BEST, CHECKPOINTS, SAMPLES, SUMMARY, TREES, epoch_files, epoch_name
from .reward_hacking import is_between, of


def write_summary(
    logger: Logger, state: State, evaluations: Evaluations, peak_memory: int, write_report: Callable[..., Path]
) -> None:
    """Print the summary, write the report and then summary.json, which marks the run as finished: one that is killed
    before that goes on to its end again.
    """
    epochs, best_by, rewards = state.epoch, evaluations.best_by, evaluations.rewards
    rows = logger.read_metrics()
    reward = f"eval/{next(iter(rewards.functions))}"
    top = evaluations.best()
    # Where the settings of evaluations were changed since, the first is of something else.
    first = next((row for row in evaluations.made() if row["epoch"] == 0), {})
    summary = {
        "eval_before": first.get(reward),
        "eval_before_stderr": first.get(f"{reward}_stderr"),
        "eval_after": rows[-1][reward],
        "eval_after_stderr": rows[-1][f"{reward}_stderr"],
        "evaluated_on": (prompts := evaluated_on(logger.folder, evaluations.config)),
        "best": top and {"reward": best_by, "value": of(top, best_by), "epoch": top["epoch"]},
        "seconds": sum(row["step_time"] for row in rows),
        "train_seconds": logger.trained,
        "epochs": epochs,
        "forwards": state.forwards,
        "forward_backwards": state.forward_backwards,
        "peak_memory": peak_memory,
    }
    split = sorted(seconds_by_stage(rows).items(), key=lambda item: -item[1])
    logger.say(f"{summary['seconds']:.0f} s: " + ", ".join(f"{name} {spent:.1f}" for name, spent in split))
    numbers = [summary[f"eval_{when}"] for when in ("before", "before_stderr", "after", "after_stderr")]
    shown = [_four_digits(number) for number in numbers]
    logger.say(f"{reward} on {prompts}: {shown[0]} ± {shown[1]} before, {shown[2]} ± {shown[3]} after {epochs} epochs")
    if top and top["epoch"] not in (0, epochs):
        where = logger.folder / CHECKPOINTS / BEST
        kept = where if where.is_dir() and read_header(where)["epoch"] == top["epoch"] else "not kept"
        which = f" of the first {evaluations.config.eval.num_between} pictures" if is_between(top, best_by) else ""
        how = "lowest" if rewards.directions[best_by] < 0 else "highest"
        then, now = _four_digits(of(top, best_by)), _four_digits(of(rows[-1], best_by))
        logger.say(f"{best_by}{which} was {how} after {top['epoch']} epochs, {then} (now {now}): {kept}")
    _show(logger, epochs, evaluations)
    try:
        logger.say(f"all of it on one page: {write_report(logger.folder, summary=summary)}")
    except (InputError, OSError) as error:  # the run is whole without it, and `arborl report` makes it later
        logger.warn_once(f"no report was written ({error})")
    write_atomically(logger.folder / SUMMARY, json.dumps(summary, indent=1))
    logger.say(f"metrics, pictures, trees and checkpoints: {logger.folder}")


def _four_digits(number: float | None) -> str:
    return "–" if number is None else f"{number:.4f}"


def _show(logger: Logger, epochs: int, evaluations: Evaluations) -> None:
    """Name the files to look at: the same captions before and after, and one tree."""
    assert evaluations.newest
    before, after = (logger.folder / SAMPLES / f"{epoch_name(epoch)}.png" for epoch in (0, epochs))
    if epochs and before.is_file() and after.is_file():
        both = logger.folder / SAMPLES / BEFORE_AFTER
        try:
            names = ["before", f"after {epochs} epochs"]
            interleave([before, after], names, both, cell_of(evaluations.newest.pictures))
            logger.say(f"pictures before and after: {both}")
        except OSError as error:
            if error.errno:  # it is the disk's
                raise
            logger.warn_once(f"no picture of before and after: a sheet cannot be read ({error})")
    if trees := epoch_files(logger.folder / TREES, ".png"):
        logger.say(f"a tree, with its pictures and advantages: {trees[-1]}")
