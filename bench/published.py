"""Folders with what well-known pipelines are published with but their weights: enough for sizes, noise levels, layers.

Where nothing is said of a part, its class's own defaults are the published sizes; the others are those that diffusers'
conversion scripts write. Parts of other libraries are only named.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

Part = tuple[str, dict[str, Any]]
"""A class of diffusers and its settings."""
EULER = "FlowMatchEulerDiscreteScheduler"


class Published(NamedTuple):
    pipeline: str
    transformer: Part
    vae: Part
    scheduler: Part
    encoders: tuple[str, ...] = ("text_encoder", "tokenizer")
    more: dict[str, Part] = {}  # noqa: RUF012 (never changed)
    options: dict[str, Any] = {}  # noqa: RUF012 (never changed)


def dynamic(base: float, most: float, length: int = 256, longest: int = 4096, terminal: float | None = None) -> Part:
    """A shift that grows with the picture."""
    lengths = {"base_image_seq_len": length, "max_image_seq_len": longest, "shift_terminal": terminal}
    return EULER, {"use_dynamic_shifting": True, "base_shift": base, "max_shift": most, **lengths}


def static(shift: float) -> Part:
    return EULER, {"shift": shift}


def multistep(kind: str, shift: float) -> Part:
    return kind, {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}


def wan(**own: Any) -> Part:
    sizes = {"num_attention_heads": 40, "num_layers": 40, "ffn_dim": 13824, "cross_attn_norm": True}
    return "WanTransformer3DModel", sizes | own


def wan22(pipeline: str, boundary: float, **own: Any) -> Published:
    """Two experts."""
    return Published(
        pipeline,
        wan(**own),
        ("AutoencoderKLWan", {}),
        multistep("UniPCMultistepScheduler", 3.0),
        more={"transformer_2": wan(**own)},
        options={"boundary_ratio": boundary},
    )


FLUX_VAE: Part = (
    "AutoencoderKL",
    {
        "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 2,
        "latent_channels": 16,
        "use_quant_conv": False,
        "use_post_quant_conv": False,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
    },
)
WAN22_VAE: Part = (
    "AutoencoderKLWan",
    {
        "base_dim": 160,
        "decoder_base_dim": 256,
        "z_dim": 48,
        "in_channels": 12,
        "out_channels": 12,
        "is_residual": True,
        "patch_size": 2,
        "latents_mean": [0.0] * 48,  # their true values change nothing here
        "latents_std": [1.0] * 48,
        "scale_factor_spatial": 16,
    },
)
DEEP_VAE: Part = (
    "AutoencoderDC",
    {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in {
            "block_types": ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3,
            "block_out_channels": [128, 256, 512, 512, 1024, 1024],
            "layers_per_block": [2, 2, 2, 3, 3, 3] if side == "encoder" else [3] * 6,
            "qkv_multiscales": [[], [], [], [5], [5], [5]],
        }.items()
    }
    | {"downsample_block_type": "Conv", "upsample_block_type": "interpolate"},
)
KLEIN: Part = (
    "Flux2Transformer2DModel",
    {
        "num_layers": 5,
        "num_single_layers": 20,
        "num_attention_heads": 24,
        "joint_attention_dim": 7680,
        "guidance_embeds": False,
    },
)

QWEN = Published(
    "QwenImagePipeline",
    ("QwenImageTransformer2DModel", {}),
    ("AutoencoderKLQwenImage", {}),
    dynamic(0.5, 0.9, longest=8192, terminal=0.02),
)
EDITOR = ("text_encoder", "tokenizer", "processor")
Z_IMAGE = Published(
    "ZImagePipeline", ("ZImageTransformer2DModel", {"axes_lens": [1536, 512, 512]}), FLUX_VAE, static(6)
)
FLUX2_KLEIN = Published("Flux2KleinPipeline", KLEIN, ("AutoencoderKLFlux2", {}), dynamic(0.5, 1.15))
PUBLISHED = {
    "qwen_image": QWEN,
    "qwen_image_2512": QWEN,
    "qwen_image_edit": QWEN._replace(pipeline="QwenImageEditPipeline", encoders=EDITOR),
    "qwen_image_edit_plus": QWEN._replace(pipeline="QwenImageEditPlusPipeline", encoders=EDITOR),
    "z_image": Z_IMAGE,
    "z_image_turbo": Z_IMAGE._replace(scheduler=static(3)),
    "flux2_dev": FLUX2_KLEIN._replace(pipeline="Flux2Pipeline", transformer=("Flux2Transformer2DModel", {})),
    "flux2_klein": FLUX2_KLEIN._replace(options={"is_distilled": True}),
    "flux2_klein_base": FLUX2_KLEIN,
    "flux_kontext": Published(
        "FluxKontextPipeline",
        ("FluxTransformer2DModel", {"guidance_embeds": True}),
        FLUX_VAE,
        dynamic(0.5, 1.15),
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
    ),
    "wan22_t2v_a14b": wan22("WanPipeline", 0.875),
    "wan22_i2v_a14b": wan22("WanImageToVideoPipeline", 0.9, in_channels=36),
    "wan22_ti2v_5b": Published(
        "WanPipeline",
        wan(num_attention_heads=24, num_layers=30, ffn_dim=14336, in_channels=48, out_channels=48),
        WAN22_VAE,
        multistep("UniPCMultistepScheduler", 5.0),
        options={"expand_timesteps": True},
    ),
    "hunyuan_video15": Published(
        "HunyuanVideo15Pipeline",
        ("HunyuanVideo15Transformer3DModel", {}),
        ("AutoencoderKLHunyuanVideo15", {}),
        static(5),
        ("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"),
        {"guider": ("ClassifierFreeGuidance", {"guidance_scale": 6.0})},
    ),
    "ltx": Published(
        "LTXPipeline",
        ("LTXVideoTransformer3DModel", {}),
        ("AutoencoderKLLTXVideo", {}),
        dynamic(0.95, 2.05, length=1024, terminal=0.1),
    ),
    "sana": Published(
        "SanaPipeline", ("SanaTransformer2DModel", {}), DEEP_VAE, multistep("DPMSolverMultistepScheduler", 3.0)
    ),
    "lumina2": Published("Lumina2Pipeline", ("Lumina2Transformer2DModel", {"cap_feat_dim": 2304}), FLUX_VAE, static(6)),
    "chroma": Published("ChromaPipeline", ("ChromaTransformer2DModel", {}), FLUX_VAE, static(1)),
}
"""By the names of their presets."""
FILES = {"scheduler": "scheduler_config.json", "guider": "guider_config.json"}


def write(preset: str, folder: Path) -> Path:
    """The folder of a preset's model."""
    found = PUBLISHED[preset]
    parts = {"transformer": found.transformer, "vae": found.vae, "scheduler": found.scheduler} | found.more
    for name, (kind, settings) in parts.items():
        (folder / name).mkdir(parents=True)
        (folder / name / FILES.get(name, "config.json")).write_text(json.dumps({"_class_name": kind} | settings))
    index = {"_class_name": found.pipeline} | found.options
    index |= {name: ["transformers", "AutoModel"] for name in found.encoders}
    index |= {name: ["diffusers", kind] for name, (kind, _) in parts.items()}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder
