"""The loop. Prompts grow into trees, trees end in pictures, pictures get scores, scores become a step; then again."""

from pathlib import Path

from .config.schema import Config
from .core.noise import fold
from .core.prune import prune
from .job import Job
from .log import Bar
from .plan import make_plan, pruning
from .prepare import prepare
from .rollout import rollout, trained_batch
from .update import update


def train(config: Config, resume: Path | None = None) -> Path:
    """Run `config.train.epochs` epochs, from the start or from a run's last checkpoint; returns the run's folder."""
    return run_epochs(prepare(config, resume))


def run_epochs(job: Job) -> Path:
    """The epochs that a job has left."""
    config, model, run, state, together = job.config, job.model, job.run, job.state, job.together
    schedule = model.schedule(config.sample.num_steps)
    with together.watched(), job.leaving(), Bar(run, state.epoch, job.epochs) as bar:
        while job.goes_on():
            epoch = state.epoch
            with run.stage("evaluate"):
                evaluation = job.evaluate_if_due(epoch)
            if job.hacked:
                break
            with run.stage("encode"), together.alone():
                share = job.share()
                cond = model.encode(share.prompts.texts)
            with run.stage("rollout"), together.sampling():
                plan = make_plan(config, schedule, epoch)
                key = fold(config.seed, epoch)
                record = rollout(
                    model,
                    plan,
                    cond,
                    key,
                    share.ids,
                    config.sample,
                    keep_clean=job.records(epoch),
                    trained_batch=trained_batch(model, config),
                )
            with run.stage("reward"), together.alone():
                scores = job.score(record, share)
            with run.stage("advantage"):
                job.tell_failures(scores, share)
                job.look_at(record, scores, share)
                advantage = job.advantage(plan, scores, record)
                keep = prune(plan, advantage, pruning(config, plan, epoch), key, share.ids)
            # Weights, averages, counters and metrics move on together or not at all.
            with together.held():
                with run.stage("update"):
                    stats = update(
                        model, state, job.accelerator, record, advantage, keep, config, key, share, not job.examined
                    )
                metrics = job.complete_epoch(plan, scores, advantage, stats, share)
                with together.alone():
                    bar.advance(run.log(epoch, metrics | evaluation))
            with run.stage("record"), together.alone():
                job.keep_tree_if_due(epoch, share, record, scores, advantage, keep, stats)
            job.stop_if_broken(stats)
            with run.stage("checkpoint"):
                job.save_if_due()
        job.finish()
    return run.folder
