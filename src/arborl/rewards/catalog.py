"""The rewards that come with the package, and what each needs beside it."""

from dataclasses import dataclass

from .files import Weights

HPS = Weights(
    hub="xswu/HPSv2",
    file="HPS_v2.1_compressed.pt",
    place="hps_ckpt/HPS_v2.1_compressed.pt",
    size="2.0 GB",
    licence="Apache-2.0",
)
PICKSCORE = Weights(hub="yuvalkirstain/PickScore_v1", place="pickscore_ckpt", size="3.9 GB", licence="MIT")
CLIP_L14 = Weights(hub="openai/clip-vit-large-patch14", place="clip_ckpt", size="1.7 GB", licence="MIT")
AESTHETIC = Weights(
    hub="camenduru/improved-aesthetic-predictor",
    file="sac+logos+ava1-l14-linearMSE.pth",
    place="aesthetic_ckpt/sac+logos+ava1-l14-linearMSE.pth",
    size="3.7 MB",
    licence="Apache-2.0",
)
IMAGEREWARD = Weights(
    hub="zai-org/ImageReward",
    file="ImageReward.pt",
    place="imagereward_ckpt/ImageReward.pt",
    size="1.8 GB",
    licence="Apache-2.0",
)
VIDEOALIGN = Weights(
    hub="KwaiVGI/VideoReward",
    file="checkpoint-11352/model.pth",
    place="videoalign_ckpt/checkpoint-11352/model.pth",
    also="model_config.json",
    size="5.0 GB",
    licence="Apache-2.0",
)


@dataclass(frozen=True)
class BuiltIn:
    """A reward of the package: where its function or class is, what it says, and what the user brings for it."""

    fn: str
    what: str
    usual: str  # the scores one sees
    needs: tuple[Weights, ...] = ()
    extra: str = ""  # of the package's optional dependencies


BUILT_IN = {
    "hps": BuiltIn("arborl.rewards.clip:Hps", "human preference, HPS-v2.1", "0.15 to 0.35", (HPS,)),
    "pickscore": BuiltIn("arborl.rewards.clip:PickScore", "human preference, PickScore v1", "18 to 24", (PICKSCORE,)),
    "imagereward": BuiltIn(
        "arborl.rewards.blip:ImageReward", "human preference, ImageReward", "-2 to 2", (IMAGEREWARD,)
    ),
    "clipscore": BuiltIn("arborl.rewards.clip:ClipScore", "picture and prompt agree", "0.15 to 0.4", (CLIP_L14,)),
    "aesthetic": BuiltIn("arborl.rewards.clip:Aesthetic", "aesthetic rating", "4 to 7", (AESTHETIC, CLIP_L14)),
    "videoalign": BuiltIn(
        "arborl.rewards.videoalign:VideoAlign", "videos: quality, motion, alignment", "-2 to 2", (VIDEOALIGN,)
    ),
    "ocr": BuiltIn("arborl.rewards.ocr:Ocr", 'the "quoted" text is written in the picture', "0 to 1", extra="ocr"),
    "jpeg": BuiltIn("arborl.rewards.simple:jpeg", "small as a JPEG file", "-1 to 0"),
    "brightness": BuiltIn("arborl.rewards.simple:brightness", "bright", "0 to 1"),
    "scene": BuiltIn("arborl.worlds.scenes.score:scene", "the built-in world: the caption came true", "0 to 1"),
    "place": BuiltIn("arborl.worlds.mixture:place", "the mixture model: the dot is where its prompt says", "0 to 1"),
}
