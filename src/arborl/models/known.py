"""Models with settings of their own that the family `pipeline` drives, and what their weights take in memory."""

from typing import NamedTuple

BILLION, GIB = 1e9, 2**30
FROZEN, TRAINED, DECODER = 2, 16, 4
"""Bytes of a parameter: frozen in bfloat16; trained in float32, with its gradient and AdamW's two moments; the VAE's in
float32.
"""


class Known(NamedTuple):
    """A preset of `config/model`. Numbers are billions of parameters, counted in the published configurations."""

    preset: str
    pipeline: str  # its class in diffusers
    hub: str
    parameters: float  # of what is trained by default
    adapter: float  # of the preset's LoRA on it
    text_encoder: float
    vae: float
    note: str = ""


QWEN = Known("qwen_image", "QwenImagePipeline", "Qwen/Qwen-Image", 20.43, 0.189, 8.29, 0.127)
Z_IMAGE = Known("z_image", "ZImagePipeline", "Tongyi-MAI/Z-Image", 6.1549, 0.067, 4.02, 0.084)
KLEIN = Known(
    "flux2_klein_base", "Flux2KleinPipeline", "black-forest-labs/FLUX.2-klein-base-4B", 3.876, 0.075, 4.02, 0.084
)
WAN = Known(
    "wan22_t2v_a14b", "WanPipeline", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", 28.58, 0.419, 5.68, 0.127, "video, two experts"
)
HUNYUAN = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v"
SANA = "Efficient-Large-Model/Sana_1600M_1024px_BF16_diffusers"
KNOWN = (
    QWEN,
    QWEN._replace(preset="qwen_image_2512", hub="Qwen/Qwen-Image-2512"),
    QWEN._replace(preset="qwen_image_edit", pipeline="QwenImageEditPipeline", hub="Qwen/Qwen-Image-Edit", note="edits"),
    QWEN._replace(
        preset="qwen_image_edit_plus",
        pipeline="QwenImageEditPlusPipeline",
        hub="Qwen/Qwen-Image-Edit-2509",
        note="edits, one picture or several",
    ),
    Z_IMAGE,
    Z_IMAGE._replace(preset="z_image_turbo", hub="Tongyi-MAI/Z-Image-Turbo", note="8 steps, no guidance"),
    Known("flux2_dev", "Flux2Pipeline", "black-forest-labs/FLUX.2-dev", 32.22, 0.333, 24.01, 0.084, "gated"),
    KLEIN._replace(preset="flux2_klein", hub="black-forest-labs/FLUX.2-klein-4B", note="4 steps, no guidance"),
    KLEIN,
    Known(
        "flux_kontext",
        "FluxKontextPipeline",
        "black-forest-labs/FLUX.1-Kontext-dev",
        *(11.9, 0.105, 4.89, 0.084),
        "edits; gated",
    ),
    WAN,
    WAN._replace(
        preset="wan22_i2v_a14b",
        pipeline="WanImageToVideoPipeline",
        hub="Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        note="picture to video, two experts",
    ),
    Known("wan22_ti2v_5b", "WanPipeline", "Wan-AI/Wan2.2-TI2V-5B-Diffusers", 5.0, 0.094, 5.68, 0.705, "video"),
    Known("hunyuan_video15", "HunyuanVideo15Pipeline", HUNYUAN, 8.327, 0.115, 7.29, 1.261, "video"),
    Known("ltx", "LTXPipeline", "Lightricks/LTX-Video", 1.923, 0.029, 4.76, 0.419, "video"),
    Known("sana", "SanaPipeline", SANA, 1.604, 0.023, 2.61, 0.312),
    Known("lumina2", "Lumina2Pipeline", "Alpha-VLLM/Lumina-Image-2.0", 2.61, 0.015, 2.61, 0.084),
    Known("chroma", "ChromaPipeline", "lodestones/Chroma1-HD", 8.9, 0.105, 4.76, 0.084),
)


def memory_forecast(known: Known, train: str = "lora", share: float = 1.0, processes: int = 1) -> float:
    """GiB that the weights take on each of so many processes which split them, with gradients and AdamW's moments;
    activations come on top.

    With "lora" the weights are frozen and the adapters trained, with "full" the weights. `share` of either is trained:
    a half is one of two experts. Text encoders are not in it, as they leave before the model is loaded
    (`prompts.cache=none` keeps them).
    """
    if train not in ("lora", "full"):
        raise ValueError(f"train={train!r} is neither 'lora' nor 'full'")
    if train == "lora":
        split = known.parameters * FROZEN + known.adapter * share * TRAINED
    else:
        split = known.parameters * (share * TRAINED + (1 - share) * FROZEN)
    return (split / processes + known.vae * DECODER) * BILLION / GIB
