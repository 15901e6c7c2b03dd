"""Train on a reward of your own, from Python: half a minute on two cores.

    python examples/own_reward.py [key=value ...]

The scenes' model draws captions such as "a small red disc at the top left on a blue background". The reward below is
for warm pictures, whatever the caption says; the built-in scorer of captions is not trained and only watched, so the
evaluations show what warmth costs.
"""

import sys

from arborl import InputError, load_config, read_metrics, train


def warmth(images, prompts, columns):
    """Red less blue, on average over the picture. Images are N×3×H×W in [0, 1]; the answer is N floats."""
    return (images[:, 0] - images[:, 2]).mean((1, 2))


if __name__ == "__main__":
    settings = [
        "rewards=none",
        "rewards.warmth.fn=own_reward:warmth",  # this file, by its name: the run's folder then says what it learnt from
        "eval.rewards=[scene]",
        "eval.every=5",
        "eval.num_prompts=32",
        "train.epochs=10",
    ]
    try:
        run = train(load_config("tree", [*settings, *sys.argv[1:]]))
    except InputError as error:  # what a user can mend is one line, as on the command line
        sys.exit(f"error: {error}")
    print("epochs  warmth  captions that came true")
    for row in read_metrics(run):
        if "eval/warmth" in row:
            print(
                f"{row['epoch']:6}  {row['eval/warmth']:+.3f}  {row['eval/scene']:.3f} ± {row['eval/scene_stderr']:.3f}"
            )
