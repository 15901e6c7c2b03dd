"""Every knob, typed, with a sentence: the one place where a setting is named, defaulted and bounded."""

from dataclasses import dataclass, field
from typing import Any

MISSING = "???"


def knob(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    words: tuple[str, ...] = (),
    own: str = "",
    lists: bool = False,
) -> Any:
    """A dataclass field with its sentence and its bounds: `low` and `high` are allowed, `above` and `below` are not;
    `words` may stand in a number's place, and package.module:name in a choice's, `own` being what that names; in a
    section of names of the user's own, `lists` too.
    """
    meta = {"help": help, "choices": choices, "low": low, "high": high, "above": above, "below": below, "words": words}
    meta |= {"own": own, "lists": lists}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=meta)
    return field(default=default, metadata=meta)


class Settings:
    """A section of settings. They are not written to once they are loaded: `with_settings` makes others of them."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            problem = f"{type(self).__name__}.{name} is a setting, and is not written to"
            raise AttributeError(f"{problem}; try: arborl.with_settings(config, {{...}}), which makes others")
        super().__setattr__(name, value)


@dataclass
class LoraConfig(Settings):
    rank: int = knob(32, "Rank of the low-rank update.", low=1)
    alpha: float = knob(64.0, "Scale of the update; the effective scale is alpha / rank.", above=0)
    targets: list[str] = knob([], "Names of the modules to adapt; empty takes the model family's usual ones.")


@dataclass
class ModelConfig(Settings):
    family: str = knob(
        "auto",
        "Which class drives the model: scenes, sd3, flux, wan, sd, sdxl, mixture; pipeline for any other diffusers "
        "pipeline, by its own loop; package.module:Class of your own; or auto, which reads the pipeline's "
        "model_index.json.",
    )
    path: str = knob("", "Folder of a diffusers pipeline, or a hub id.")
    train: str = knob("lora", "What is trained: a low-rank adapter, or every weight.", choices=("lora", "full"))
    lora: LoraConfig = field(default_factory=LoraConfig)
    components: list[str] = knob(
        [], "pipeline: parts of it that are trained, such as transformer_2; empty trains all that its loop calls."
    )
    call: dict[str, Any] = knob(
        {},
        "pipeline: further arguments of its call, by their names. column:NAME takes a column of the prompt file: "
        "pictures by their paths, relative to the file.",
        lists=True,
    )
    dtype: str = knob(
        "auto",
        "Precision of frozen weights; auto is bfloat16 on a GPU and float32 on a CPU.",
        choices=("auto", "float32", "bfloat16"),
    )
    vae_dtype: str = knob(
        "auto",
        "Precision that pictures are decoded in. auto is float32, or where the decoder is compiled and known to bear "
        "it (SD3's) float16; bfloat16 leaves bands in pictures, and rewards see them.",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    max_sequence_length: int = knob(
        256,
        "Text tokens given to T5, for models that have one (SD3 without its T5 adds as many zero tokens). pipeline: 0 "
        "leaves it to the pipeline's own call.",
        low=0,
    )


@dataclass
class PromptsConfig(Settings):
    path: str = knob(
        "",
        "Prompt file: one a line, or JSONL with `prompt` and further columns for rewards. "
        "Empty takes the model's own list.",
    )
    held_out: float = knob(
        0.05,
        "Share of that file's prompts which are not trained on, for evaluations where eval.prompts names no file: "
        "those that a hash of their text chooses. A file is left whole where fewer than 16 would be held out.",
        low=0,
        high=0.5,
    )
    cache: str = knob(
        "auto",
        "Folder where encoded prompts are kept, so that text encoders need not stay in memory; auto is "
        "arborl/embeddings in the user's cache folder, none encodes anew each epoch.",
    )
    batch_size: int = knob(16, "Prompts encoded at a time.", low=1)


@dataclass
class SampleConfig(Settings):
    num_prompts: int = knob(4, "Prompts per process and epoch.", low=1)
    prompts_per_epoch: int | None = knob(
        None, "Prompts of an epoch over all processes, dealt out evenly; null is sample.num_prompts for each.", low=1
    )
    num_trees: int = knob(1, "Trees per prompt, each from its own noise.", low=1)
    group_size: int = knob(16, "Trajectories per prompt in the plans flat and (per tree) mix.", low=1)
    shared_noise: bool = knob(False, "Start a flat group from one noise instead of separate ones.")
    num_steps: int = knob(10, "Denoising steps while training.", low=1, high=1000)
    sigmas: str = knob(
        "shift",
        "Noise levels of a flow: shift·t/(1+(shift-1)t) on an even grid, or the pipeline scheduler's own.",
        choices=("shift", "pipeline"),
    )
    shift: float | None = knob(
        None,
        "The shift of that grid; null takes the pipeline's own (FLUX's grows with the picture), 3 where there is none.",
        above=0,
    )
    tail_solver: str = knob(
        "euler",
        "How the steps after the last stochastic one are taken: Euler, or DPM-Solver++(2M), which needs fewer.",
        choices=("euler", "dpmpp_2m"),
    )
    tail_steps: int = knob(0, "In how many steps, at most; 0 takes those of the schedule.", low=0)
    guidance_scale: float = knob(
        1.0,
        "Classifier-free guidance, 1 is off; the value a guidance-distilled model (FLUX.1-dev) is given. With "
        "model.family=pipeline what the pipeline's own call means by it: for Z-Image 0 is off.",
        low=0,
    )
    negative_prompt: str = knob("", "What classifier-free guidance leads away from.")
    resolution: int = knob(512, "Height of the pictures in pixels, and their width where sample.width is null.", low=8)
    width: int | None = knob(None, "Width of the pictures; null makes them square.", low=8)
    num_frames: int = knob(1, "Frames of a video; 1 for models that make pictures.", low=1)
    batch_size: int | str = knob(
        16,
        "Latents per model call while sampling; auto tries what fits and is fastest. In compiled runs those that are "
        "trained go in micro-batches of train.batch_size.",
        low=1,
        words=("auto",),
    )
    decode_batch_size: int | str = knob(8, "Pictures decoded and scored at a time, or auto.", low=1, words=("auto",))
    pad_batches: bool = knob(False, "Fill every model call up to the same shape (bitwise ratio 1; one compiled graph).")
    offload: bool = knob(False, "Keep the rollout's latents in host memory between the stages.")


@dataclass
class TreeConfig(Settings):
    plan: str = knob("tree", "Shape of the rollout.", choices=("tree", "branch", "flat", "mix", "comb"))
    k: int = knob(2, "Children of a node where it branches (tree, branch, comb).", low=1)
    siblings: str = knob(
        "balanced",
        "Noise of the stochastic children of one node: balanced draws sum to zero, so that what siblings have in "
        "common cancels (each child is distributed as before); independent draws are as published.",
        choices=("balanced", "independent"),
    )
    w: int = knob(4, "Steps in the window (tree, mix).", low=1)
    s: int = knob(1, "Steps the window moves at a time.", low=0)
    tou: int = knob(1, "Epochs between two moves of the window.", low=1)
    split_points: list[int] = knob([], "Steps at which branch and comb split, from 0; empty takes split_rounds.")
    split_rounds: int = knob(4, "Number of splits, spread evenly over the steps that can bear them.", low=1)
    split_noise_scale: float | None = knob(
        None,
        "branch: κ, which scales the noise at a split; null takes 4 with dance_sde (as published) and 1 with others.",
        above=0,
    )
    mix_ode_sde: bool = knob(False, "branch: only the splits and a moving window are stochastic, the rest is ODE.")
    mix_sde_window: int = knob(4, "Steps in that window; it moves by tree.s every tree.tou epochs.", low=1)
    max_leaves: int = knob(1024, "Most leaves a prompt may have.", low=1, high=4096)


@dataclass
class KernelConfig(Settings):
    name: str = knob(
        "auto",
        "Transition along a stochastic edge; auto picks by model family: kernel.flow for flow models, else ddim. "
        "ode is no noise at all, for losses that need no densities: only with tree.plan=flat and separate noise "
        "(sample.shared_noise=false).",
        choices=("auto", "flow_sde", "dance_sde", "cps", "ddim", "ode"),
    )
    flow: str = knob("flow_sde", "What auto means for flow models.", choices=("flow_sde", "dance_sde", "cps"))
    eta: float | None = knob(
        None,
        "Noise level of stochastic steps; null takes the kernel's usual: flow_sde and cps 0.7, dance_sde 0.3, ddim 1.",
        above=0,
    )
    excess_noise: bool = knob(
        False,
        "Flat plan: also add noise where a step adds more than the level it reaches "
        "(as Flow-GRPO does; noise then survives in the picture).",
    )


@dataclass
class AdvantageConfig(Settings):
    name: str = knob(
        "tree",
        "How leaf scores become one number per edge; package.module:function is one of your own (docs/extending.md).",
        choices=("tree", "depth", "flat"),
        own="function",
    )
    backup: str = knob(
        "softmax",
        "Weights of sibling edges on the way up: softmax of log-densities, or equal.",
        choices=("softmax", "mean"),
    )
    temperature: float = knob(1.0, "Temperature of that softmax.", above=0)
    fusion: str = knob(
        "mean",
        "depth: a node's reward is the mean of the leaves below it, or its children's by softmax of log-densities.",
        choices=("mean", "path_prob"),
    )
    group: str = knob(
        "tree",
        "depth: which nodes are compared: those of a depth in one tree, in all the prompt's trees, or siblings.",
        choices=("tree", "prompt", "siblings"),
    )
    std: str = knob(
        "group",
        "What score differences are divided by: the standard deviation of the group they are taken in, so that every "
        "group weighs alike; that of all the epoch's leaves; or nothing.",
        choices=("group", "batch", "none"),
    )
    combine: str = knob(
        "zscore",
        "Several rewards: weighted z-scores over the prompt's leaves, or weighted raw sum.",
        choices=("zscore", "sum"),
    )


@dataclass
class PruneConfig(Settings):
    depth: list[int] = knob([], "Edges into these depths are not trained (the roots' children stand at depth 1).")
    depth_slide: bool = knob(False, "Move these depths towards the root as training goes on.")
    slide_interval: int = knob(30, "Epochs between two such moves, of one step.", low=1)
    stop_depth: int | None = knob(None, "Where the first of them stops; null is the last split.", low=1)
    width_mode: str = knob(
        "off",
        "Of the chains after the last split train all (off), the best among siblings, or the best and worst of the "
        "tree; 0, 1 and 2 mean the same.",
        choices=("off", "best", "best_and_worst"),
    )
    width_ratio: float = knob(0.5, "Share of the chains that the other modes keep.", above=0, high=1)
    step_fraction: float = knob(
        1.0, "Share of the stochastic steps that is trained, drawn for each prompt and epoch.", above=0, high=1
    )
    until: float = knob(1.0, "Prune depth and width during this first share of the run only.", low=0, high=1)


@dataclass
class LossConfig(Settings):
    name: str = knob(
        "surrogate",
        "How a rollout trains the model: by its edges, PPO's clipped surrogate, dppo (Flow-DPPO) or guard "
        "(GRPO-Guard); or by its leaves, noised again, nft (DiffusionNFT) or awm (Advantage Weighted Matching); "
        "package.module:Class is one of your own (docs/extending.md).",
        choices=("surrogate", "dppo", "guard", "nft", "awm"),
        own="Class",
    )
    clip: float = knob(
        1e-4, "Half-width of the ratio's clip range (surrogate, guard; other losses ignore it).", above=0
    )
    kl: float = knob(
        0.0,
        "Weight of the KL to the frozen base model (surrogate, dppo, guard), or of the mean square of the answers' "
        "difference (nft, awm); 0 is off.",
        low=0,
    )
    edge_weight: str = knob(
        "equal",
        "Weight of an edge in the loss: all the same, or by the noise it added, mean 1 (surrogate, dppo, guard; other "
        "losses ignore it).",
        choices=("equal", "noise"),
    )
    adv_clip: float = knob(5.0, "Advantages are clamped to plus or minus this.", above=0)
    options: dict[str, Any] = knob({}, "Further arguments of the loss, by their names (docs/method.md).")


@dataclass
class TrainConfig(Settings):
    epochs: int = knob(100, "Epochs: one rollout and its updates each.", low=0)
    max_seconds: float = knob(0.0, "Stop once training, evaluation apart, has taken this long; 0 is off.", low=0)
    updates: int = knob(1, "Optimizer steps per epoch, over a seeded partition of the model calls.", low=1)
    batch_size: int | str = knob(
        8, "Model calls per forward + backward (parents, or noised leaves), or auto.", low=1, words=("auto",)
    )
    learning_rate: float = knob(3e-4, "AdamW's step size.", above=0)
    schedule: str = knob(
        "constant",
        "How that rate falls over the run's optimizer steps (over train.max_seconds, where that comes first): not at "
        "all, in a line, or as half a cosine; almost to 0 at the last.",
        choices=("constant", "linear", "cosine"),
    )
    warmup: int = knob(0, "Optimizer steps at the start of the run over which the rate rises in equal parts.", low=0)
    weight_decay: float = knob(1e-4, "AdamW's decay.", low=0)
    beta1: float = knob(0.9, "AdamW's first moment.", low=0, below=1)
    beta2: float = knob(0.999, "AdamW's second moment.", low=0, below=1)
    max_grad_norm: float = knob(1.0, "Gradient norm above which gradients are scaled down.", above=0)
    ema_decay: float = knob(
        0.0, "Decay of the weight average that evaluation and sampling use; 0 is off.", low=0, below=1
    )
    ema_every: int = knob(1, "Optimizer steps between two updates of that average.", low=1)
    cfg_grad: str = knob(
        "both",
        "With guidance: let gradients through both halves, or (cheaper, approximate) cond only.",
        choices=("both", "cond"),
    )
    mixed_precision: str = knob(
        "auto",
        "Arithmetic of model calls; auto is bf16 on a GPU and float32 on a CPU.",
        choices=("auto", "no", "bf16"),
    )
    gradient_checkpointing: bool | str = knob(
        False,
        "Recompute activations in the backward pass to save memory: all those inside the model's blocks, or selective, "
        "the ones that cost little to have again.",
        words=("selective",),
    )
    shard: str = knob(
        "auto",
        "Split weights, gradients and optimizer (FSDP2) over all processes, or over those of a node so that each has "
        "a copy; auto does what the accelerate config says.",
        choices=("auto", "no", "full", "node"),
    )
    max_nonfinite_steps: int = knob(
        10,
        "Stop after as many optimizer steps in a row whose gradient is not finite; until then they are left out.",
        low=1,
    )
    max_failed: float = knob(
        0.5,
        "Stop when a reward fails on, or answers NaN for, more than this share of an epoch's leaves; until then they "
        "are left out.",
        low=0,
        high=1,
    )


@dataclass
class RewardConfig(Settings):
    fn: str = knob("", "A built-in reward, or package.module:function; empty takes the built-in one of this name.")
    weight: float | None = knob(
        None,
        "Its weight in the leaf score; 0 only logs it. null is 1, or 0 where eval.rewards names it.",
    )
    path: str = knob(
        "", "Its weights: a file, a folder or a hub id; empty looks in their usual place (docs/rewards.md)."
    )
    backbone: str = knob(
        "",
        "The network under aesthetic's head (CLIP ViT-L/14) and under videoalign (Qwen2-VL-2B): a folder or a hub id; "
        "empty takes the one they were trained with.",
    )
    tokenizer: str = knob(
        "",
        "Folder or hub id of its tokenizer; empty takes the one beside its weights, the CLIP one of the pipeline that "
        "is trained, or the hub's.",
    )
    dtype: str = knob(
        "auto",
        "Precision of its network; auto is half on a GPU (float16 for CLIP, bfloat16 for others), float32 on a CPU. "
        "Scores are float32.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    batch_size: int = knob(32, "Pictures given to its network, or sent to a server, at a time.", low=1)
    fps: float = knob(16.0, "Frames in a second of the videos; videoalign looks at two in a second.", above=0)
    url: Any = knob(
        "", "Where a server answers in its place (see `arborl serve`): http://host:port, or a list of these to share."
    )
    token: str = knob("ARBORL_REWARD_TOKEN", "Name of the environment variable that holds the server's token.")
    timeout: float = knob(60.0, "Seconds that an answer of a server may take.", above=0, high=1e6)
    retries: int = knob(4, "Further attempts where a server does not answer, after 1, 2, 4, … seconds.", low=0)


@dataclass
class EvalConfig(Settings):
    every: int = knob(10, "Epochs between evaluations; 0 evaluates before and after only.", low=0)
    prompts: str = knob(
        "",
        "Prompt file for evaluation; empty takes what prompts.held_out keeps from training, or where those are the "
        "model's own list, its held-out ones; and where nothing is held out the training prompts.",
    )
    num_prompts: int = knob(64, "Pictures to score, one for each of that file's prompts in turn.", low=1)
    num_between: int = knob(
        32,
        "Pictures to score in evaluations between the first and the last: the first of eval.num_prompts, so that a "
        "curve costs little; 0 is all of them.",
        low=0,
    )
    num_steps: int = knob(0, "Denoising steps; 0 takes sample.num_steps.", low=0, high=1000)
    rewards: list[str] = knob(
        [],
        "Rewards to watch besides the trained ones: built-in names, or names under rewards. Without a weight of their "
        "own there they are asked in evaluations alone.",
    )
    best: str = knob(
        "",
        "The reward whose best evaluation is kept as checkpoints/best; empty is the first watched one, else the first.",
    )
    watch: str = knob(
        "warn",
        "What to do when evaluations show the trained reward rising while watched rewards or the pictures get worse.",
        choices=("off", "warn", "stop"),
    )


@dataclass
class LogConfig(Settings):
    dir: str = knob("runs", "Folder that holds the run folders.")
    trackers: list[str] = knob(
        ["auto"],
        "Trackers besides metrics.jsonl: tensorboard, wandb, trackio; auto is TensorBoard where it is installed.",
    )
    save_every: int = knob(10, "Epochs between checkpoints; one is always written at the end.", low=1)
    keep: int = knob(2, "Checkpoints kept.", low=1)
    record_every: int = knob(10, "Epochs between recorded and drawn trees; 0 is off.", low=0)


@dataclass
class Config(Settings):
    seed: int = knob(0, "Everything random is a function of it.", low=0, high=2**63 - 1)
    run_name: str = knob("auto", "Name of the run's folder; auto takes the next free number.")
    compile: str = knob(
        "auto",
        "Run the model as compiled code (torch.compile): about twice as fast on a GPU, after a minute or two at the "
        "start. auto does it on a GPU, for models that were measured so (SD3, FLUX, Wan), where the run is long enough "
        "to get that back.",
        choices=("auto", "on", "off"),
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)
    tree: TreeConfig = field(default_factory=TreeConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    prune: PruneConfig = field(default_factory=PruneConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    eval: EvalConfig = field(default_factory=EvalConfig)
    log: LogConfig = field(default_factory=LogConfig)
