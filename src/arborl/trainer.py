"""The loop. Prompts grow into trees, trees end in pictures, pictures get scores, scores become a step; then again."""

from pathlib import Path

from .config.schema import Config
from .engine.rollout import sample_trees
from .engine.score import score
from .engine.update import update
from .report import write_report
from .run.run import Run
from .run.setup import prepare
from .tools.output import tolerant_output


def train(config: Config, resume: Path | None = None) -> Path:
    """Run `config.train.epochs` epochs, from the start or from a run's last checkpoint; returns the run's folder."""
    with tolerant_output():
        return run_epochs(prepare(config, resume))


def run_epochs(run: Run) -> Path:
    """The epochs that a run has left."""
    policy, method, state, rewards = run.policy, run.method, run.state, run.rewards.trained
    with run.under_way():
        while run.goes_on():
            epoch = run.next_epoch()
            with run.stage("evaluate"):
                run.evaluate_if_due(epoch)
            if run.evaluations.hacked:
                break
            with run.stage("encode"):
                cond = policy.encode(epoch.prompts.prompts)
            with run.stage("rollout"):
                rollout = sample_trees(policy, epoch, cond)
            run.check_rollout(rollout)
            with run.stage("reward"):
                scored = score(policy, rewards, rollout, run.stage)
            run.check_scores(rollout, scored)
            with run.stage("advantage"):
                advantage, keep = method.credit(epoch, scored, rollout)
            with run.stage("update"):
                stats = update(policy, state, method.loss, rollout, advantage, keep, epoch.learning_rates)
            run.complete(epoch, rollout, scored, advantage, keep, stats)
        run.finish(write_report)
    return run.logger.folder
