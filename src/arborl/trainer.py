"""The loop. Prompts grow into trees, trees end in pictures, pictures get scores, scores become a step; then again."""

from pathlib import Path

from .config.schema import Config
from .core.noise import fold
from .core.prune import prune
from .engine.method import make_plan, pruning
from .engine.rollout import sample_trees, trained_batch
from .engine.update import update
from .report import write_report
from .run.progress import ProgressBar
from .run.run import Run
from .run.setup import prepare
from .tools.output import tolerant_output


def train(config: Config, resume: Path | None = None) -> Path:
    """Run `config.train.epochs` epochs, from the start or from a run's last checkpoint; returns the run's folder."""
    with tolerant_output():
        return run_epochs(prepare(config, resume))


def run_epochs(run: Run) -> Path:
    """The epochs that a run has left."""
    config, model, state, accelerator = run.config, run.model, run.state, run.accelerator
    logger, coordinator = run.logger, run.coordinator
    schedule = model.schedule(config.sample.num_steps)
    bar = ProgressBar(logger, state.epoch, run.epochs, config.train.max_seconds)
    with coordinator.handling_signals(), run.leaving(), bar:
        while run.goes_on():
            epoch = state.epoch
            with logger.stage("evaluate"):
                evaluation = run.evaluate_if_due(epoch)
            if run.evaluations.hacked:
                break
            with logger.stage("encode"), coordinator.independent():
                local = run.local_prompts()
                cond = model.encode(local.prompts.texts)
            with logger.stage("rollout"), coordinator.independent_sampling():
                plan = make_plan(config, schedule, epoch)
                key = fold(config.seed, epoch)
                records, batch = run.records(epoch), trained_batch(model, config)
                rollout = sample_trees(model, plan, cond, key, local.ids, config.sample, records, trained_batch=batch)
            run.check_finite(rollout, local)
            with logger.stage("reward"), coordinator.independent():
                scores = run.score(rollout, local)
            with logger.stage("advantage"):
                run.check_decoded(scores, local)
                run.guards.check_rewards(scores, local, epoch)
                run.guards.check_rollout(rollout, scores, local)
                advantage = run.advantage(plan, scores, rollout)
                keep = prune(plan, advantage, pruning(config, plan, epoch), key, local.ids)
            # Weights, averages and counters move on together or not at all, and their metrics with them.
            with coordinator.uninterruptible():
                with logger.stage("update"):
                    check = run.guards.checks_gradients
                    stats = update(model, state, accelerator, rollout, advantage, keep, config, key, local, check)
                metrics = run.complete_epoch(plan, scores, advantage, stats, local)
                with coordinator.independent():
                    bar.advance(logger.log(epoch, metrics | evaluation))
            with logger.stage("record"), coordinator.independent():
                run.keep_tree_if_due(epoch, local, rollout, scores, advantage, keep, stats)
            run.guards.stop_if_nonfinite(stats, state.nonfinite_steps)
            with logger.stage("checkpoint"):
                run.saver.save_if_due()
        run.finish(write_report)
    return logger.folder
