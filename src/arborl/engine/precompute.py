"""Prompts encoded ahead of a run, shared out among the ranks; what was encoded before is not encoded again."""

import time
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..config.schema import Config
from ..data.prompts import Prompts, prompt_order
from ..distributed.accelerator import Accelerator
from ..distributed.coordination import fail_together
from ..models import model_class


class Embedded(NamedTuple):
    """Result of encoding ahead, on all ranks."""

    texts: int
    encoded: int
    seconds: float
    folder: str

    def __str__(self) -> str:
        done = f"{self.encoded} prompt(s) encoded in {self.seconds:.1f} s" if self.encoded else "none to encode"
        return f"embeddings: {done}, {self.texts - self.encoded} kept from before, in {self.folder}"


def precompute_embeddings(
    config: Config, prompts: Prompts, accelerator: Accelerator, verify: bool = True
) -> Embedded | None:
    """Encode what of these prompts is not on disk yet; None for a model that encodes its prompts on the spot.

    `verify` reads what is on disk, so that nothing is found damaged once the model is in memory.
    """
    family = model_class(config)
    embeddings = family.embeddings(config, accelerator.device)
    if embeddings is None:
        return None
    requests = family.requests(prompts, config)
    start, rank, ranks = time.perf_counter(), accelerator.process_index, accelerator.num_processes
    with fail_together(accelerator):  # all have looked before one writes, so all see the same list
        missing = embeddings.missing(requests, verify)
    columns = TextColumn("encoding prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=rank > 0 or not missing, transient=True) as bar:
        task = bar.add_task("", total=len(missing[rank::ranks]))
        with fail_together(accelerator):
            embeddings.fill(missing[rank::ranks], config.prompts.batch_size, lambda count: bar.advance(task, count))
        # On one disk this finds nothing; machines that share none encode the rest themselves.
        with fail_together(accelerator):
            embeddings.fill(embeddings.missing(requests, verify=False), config.prompts.batch_size)
    count = len({embeddings.path(each) for each in [*embeddings.always, *requests]})
    return Embedded(count, len(missing), time.perf_counter() - start, str(embeddings.folder))


def prompts_of_a_run(config: Config, prompts: Prompts, held_out: Prompts, start: int, count: int) -> Prompts:
    """Prompts that a run will encode: the prompts it deals out from a place on, and those of its evaluations."""
    # Within a pass each prompt comes once, so that two passes hold them all wherever they begin.
    chosen = prompt_order(len(prompts), start, min(count, 2 * len(prompts)), config.seed)
    evaluated = held_out.take(range(min(len(held_out), config.eval.num_prompts)))
    return prompts.take(sorted(set(chosen))).followed_by(evaluated)
