"""The loop. Prompts grow into trees, trees end in pictures, pictures get scores, scores become a step; then again."""

from pathlib import Path

from .config.schema import Config
from .core.noise import fold
from .core.prune import prune
from .log import Bar, Interrupts
from .plan import make_plan, pruning
from .prepare import prepare
from .rollout import rollout
from .update import update


def train(config: Config, resume: Path | None = None) -> Path:
    """Run `config.train.epochs` epochs, from the start or from a run's last checkpoint; returns the run's folder."""
    job = prepare(config, resume)
    model, run, state = job.model, job.run, job.state
    schedule = model.schedule(config.sample.num_steps)
    interrupts = Interrupts(job.accelerator)
    try:
        with interrupts.watched(), Bar(run, state.epoch, job.epochs) as bar:
            while job.goes_on():
                epoch = state.epoch
                with run.stage("evaluate"):
                    evaluation = job.evaluate_if_due(epoch)
                if job.hacked:
                    break
                with run.stage("encode"):
                    prompts, prompt_ids = job.prompts_of(epoch)
                    cond = model.encode(prompts.texts)
                with run.stage("rollout"):
                    plan = make_plan(config, schedule, epoch)
                    key = fold(config.seed, epoch)
                    record = rollout(model, plan, cond, key, prompt_ids, config.sample, keep_clean=job.records(epoch))
                with run.stage("score"):
                    scores = job.score(record, prompts)
                with run.stage("advantage"):
                    advantage = job.advantage(plan, scores, record)
                    keep = prune(plan, advantage, pruning(config, plan, epoch), key, prompt_ids)
                with run.stage("record"):
                    job.keep_tree_if_due(epoch, prompts, record, scores, advantage, keep)
                # Weights, averages, counters and metrics move on together or not at all.
                with interrupts.held():
                    with run.stage("update"):
                        stats = update(model, state, job.accelerator, record, advantage, keep, config, key)
                    metrics = job.complete_epoch(plan, scores, advantage, stats)
                    bar.advance(run.log(epoch, metrics | evaluation))
                with run.stage("checkpoint"):
                    job.save_if_due()
        job.finish()
    finally:
        job.leave(interrupts.torn, interrupts.together)
    return run.folder
