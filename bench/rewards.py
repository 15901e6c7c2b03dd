"""Speed of the network rewards at true size with random weights: `python -m bench.rewards`, on a GPU if there is one.

Files are written in the layouts their authors publish and read by the same path as real ones. Prints, for each reward
and precision, seconds to load (the first time with conversion, then from the converted copy), pictures a second from
512 px with preparation and text, memory, and how far half precision moves a score.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from arborl.config.schema import RewardConfig
from arborl.rewards.base import Reward, make_reward
from bench.reward_files import (
    BLIP,
    TINY,
    TINY_BLIP,
    VIT_H,
    bert_tokenizer,
    clip_folder,
    clip_tokenizer,
    head,
    image_reward,
    open_clip,
    video_align,
)

PROMPTS = [f"{'a red kite over a grey harbour, ' * 3}number {i}" for i in range(16)]


def write(name: str, home: Path, tiny: bool) -> dict[str, str]:
    """A reward's files; returns its settings."""
    if name == "hps":
        sizes = TINY if tiny else VIT_H
        torch.save({"state_dict": open_clip(sizes, dtype=torch.float16)}, home / "HPS_v2.1_compressed.pt")
        return {"path": str(home)}
    if name == "imagereward":
        torch.save(image_reward(TINY_BLIP if tiny else BLIP), home / "ImageReward.pt")
        return {"path": str(home), "tokenizer": str(bert_tokenizer(home / "bert"))}
    if name == "videoalign":
        return video_align(home)
    folder = home / "clip"
    if not folder.exists():
        clip_folder(folder, tiny=tiny)
    if name == "clipscore":
        return {"path": str(folder)}
    torch.save(head("layers.", 16 if tiny else 768), home / "sac+logos+ava1-l14-linearMSE.pth")
    return {"path": str(home), "backbone": str(folder)}


def timed(reward: Reward, images: torch.Tensor, prompts: list[str]) -> tuple[float, torch.Tensor]:
    """Seconds, and the scores (of one that has parts, their mean)."""
    if images.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    scores = reward(images, prompts, {})
    scores = torch.stack([*scores.values()]).mean(0) if isinstance(scores, Mapping) else scores
    scores = scores.cpu()
    return time.perf_counter() - start, scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["hps", "clipscore", "aesthetic", "imagereward"])
    parser.add_argument("--tiny", action="store_true", help="tiny networks, to try this script")
    parser.add_argument("--count", type=int, default=512, help="pictures")
    parser.add_argument("--tokenizer", help="folder with CLIP's tokenizer; else from the open_clip_torch package")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cuda = device.type == "cuda"
    images = torch.rand(options.count, 3, 64, 64, device=device)
    images = torch.nn.functional.interpolate(images, (512, 512), mode="bicubic").clamp(0, 1)
    prompts = [PROMPTS[i * len(PROMPTS) // options.count] for i in range(options.count)]
    print(torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads", flush=True)
    print("| reward | precision | batch | load s | pictures/s | GiB | largest change of a score |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        os.environ["ARBORL_CACHE"] = str(home / "cache")
        tokenizer = options.tokenizer or str(clip_tokenizer(home / "tokenizer"))
        for name in options.names:
            settings = {"tokenizer": tokenizer} | write(name, home, options.tiny)
            exact = None
            cases = [("float32", 32), ("bfloat16", 32), ("bfloat16", 128), ("float16", 32), ("float16", 128)]
            videos = name == "videoalign"  # of 33 frames at 16 a second, as Wan makes them
            some = images[:16, None, :, :480].expand(-1, 33, -1, -1, -1) if videos else images
            for dtype, size in cases[:2] if videos else cases if cuda else cases[:1]:
                if cuda:
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated() if cuda else 0
                reward = make_reward(name, RewardConfig(fn=name, dtype=dtype, batch_size=size, **settings))
                load, _ = timed(reward, some[:1], prompts[:1])
                timed(reward, some[: 2 * size], prompts[: min(2 * size, len(some))])
                seconds, scores = timed(reward, some, prompts[: len(some)])
                exact = scores if exact is None else exact
                used = (torch.cuda.max_memory_allocated() - held) / 2**30 if cuda else 0.0
                change = f"{(scores - exact).abs().max():.1e} of {exact.std():.1e}"
                speed = len(some) / seconds
                print(f"| {name} | {dtype} | {size} | {load:.1f} | {speed:.3g} | {used:.1f} | {change} |", flush=True)
                del reward


if __name__ == "__main__":
    main()
