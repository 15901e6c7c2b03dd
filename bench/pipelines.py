"""Real diffusers pipelines with random weights, built offline: tiny ones for tests, ones of true size for timing.

Text encoders are tiny at every size unless `text="full"` (SD3.5 only): they run once a prompt.
"""

from collections.abc import Callable
from typing import Any

import torch

WORDS = ["a", "photo", "of", "cat", "dog", "red", "blue", "house"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"

TINY_VAE = {"block_out_channels": (8, 8), "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4}
FULL_VAE = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16}

SD3 = {
    "tiny": {
        "transformer": {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "caption_projection_dim": 16,
            "pooled_projection_dim": 32,
            "pos_embed_max_size": 8,
            "qk_norm": "rms_norm",
        },
        "vae": TINY_VAE,
    },
    "full": {
        "transformer": {
            "sample_size": 128,
            "patch_size": 2,
            "in_channels": 16,
            "out_channels": 16,
            "num_layers": 24,
            "attention_head_dim": 64,
            "num_attention_heads": 24,
            "joint_attention_dim": 4096,
            "caption_projection_dim": 1536,
            "pooled_projection_dim": 2048,
            "pos_embed_max_size": 384,
            "dual_attention_layers": tuple(range(13)),
            "qk_norm": "rms_norm",
        },
        "vae": FULL_VAE,
    },
}
FLUX = {
    "tiny": {
        "transformer": {
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8),
            "guidance_embeds": True,
        },
        "vae": TINY_VAE,
    },
    "full": {"transformer": {"guidance_embeds": True}, "vae": FULL_VAE},
}
WAN = {
    "tiny": {
        "transformer": {
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 16,
            "out_channels": 16,
            "text_dim": 16,
            "freq_dim": 32,
            "ffn_dim": 32,
            "num_layers": 2,
            "cross_attn_norm": True,
            "rope_max_seq_len": 32,
        },
        "vae": {"base_dim": 3, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
    },
    "full": {
        "transformer": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        "vae": {},
    },
}
UNET = {
    "sample_size": 8,
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
}
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}


def clip_tokenizer() -> Any:
    from transformers import CLIPTokenizer

    pieces = ["<|startoftext|>", "<|endoftext|>", *[word + "</w>" for word in WORDS], *LETTERS]
    pieces += [letter + "</w>" for letter in LETTERS if letter + "</w>" not in pieces]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=16)


def t5_tokenizer() -> Any:
    from transformers import T5Tokenizer

    pieces = ["<pad>", "</s>", "<unk>", *["▁" + word for word in WORDS], "▁", *LETTERS]
    scores = {piece: -2.0 if piece.startswith("▁") else -5.0 for piece in pieces}
    return T5Tokenizer(vocab=[(piece, scores[piece]) for piece in dict.fromkeys(pieces)], extra_ids=0)


def clip_encoder(projection: int | None = None, width: int = 16, **size: Any) -> Any:
    """With a projection, as SD3 and SDXL have it, or without."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = {
        "vocab_size": 64,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    config |= size
    if projection is None:
        return CLIPTextModel(CLIPTextConfig(**config)).eval()
    return CLIPTextModelWithProjection(CLIPTextConfig(projection_dim=projection, **config)).eval()


def t5_encoder(width: int, umt5: bool = False, **size: Any) -> Any:
    from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel

    kind, model = (UMT5Config, UMT5EncoderModel) if umt5 else (T5Config, T5EncoderModel)
    sizes = {"vocab_size": 64, "d_model": width, "d_kv": 8, "d_ff": 2 * width, "num_layers": 2, "num_heads": 2}
    sizes |= {"feed_forward_proj": "gated-gelu"}
    return model(kind(**(sizes | size))).eval()  # fresh ones are in train mode, with dropout


def autoencoder(size: dict[str, Any], **own: Any) -> Any:
    from diffusers import AutoencoderKL

    blocks = len(size["block_out_channels"])
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        **(size | own),
    ).eval()


def randomised(module: Any, std: float) -> Any:
    """Fresh transformers end in zeros; without this they would answer a constant and nothing could be compared."""
    for parameter in module.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
    return module.eval()


def sd3(size: str = "tiny", text: str = "tiny") -> Any:
    """SD3.5-medium's layout; with T5 when tiny or when text encoders are full, else without."""
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    sizes = SD3[size]
    if text == "full":
        big = {"vocab_size": 49408, "max_position_embeddings": 77, "hidden_act": "gelu"}
        encoders = [
            clip_encoder(768, 768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, **big),
            clip_encoder(1280, 1280, num_hidden_layers=32, num_attention_heads=20, intermediate_size=5120, **big),
            t5_encoder(4096, vocab_size=32128, d_kv=64, d_ff=10240, num_layers=24, num_heads=64),
        ]
    else:
        projections = {"tiny": (16, 16), "full": (768, 1280)}[size]
        encoders = [clip_encoder(projection) for projection in projections]
        encoders.append(t5_encoder(32) if size == "tiny" else None)
    return StableDiffusion3Pipeline(
        transformer=randomised(SD3Transformer2DModel(**sizes["transformer"]), 0.2 if size == "tiny" else 0.02),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=autoencoder(
            sizes["vae"], use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0609, scaling_factor=1.5305
        ),
        text_encoder=encoders[0],
        tokenizer=clip_tokenizer(),
        text_encoder_2=encoders[1],
        tokenizer_2=clip_tokenizer(),
        text_encoder_3=encoders[2],
        tokenizer_3=t5_tokenizer() if encoders[2] is not None else None,
    )


def flux(size: str = "tiny", guidance: bool = True) -> Any:
    """FLUX.1-dev's layout, or without guidance and dynamic shift -schnell's."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    sizes = FLUX[size]
    width = {"tiny": (16, 16), "full": (4096, 768)}[size]
    transformer = FluxTransformer2DModel(**(sizes["transformer"] | {"guidance_embeds": guidance}))
    return FluxPipeline(
        transformer=randomised(transformer, 0.1 if size == "tiny" else 0.02),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0 if guidance else 1.0, use_dynamic_shifting=guidance),
        vae=autoencoder(
            sizes["vae"], use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1159, scaling_factor=0.3611
        ),
        text_encoder=clip_encoder(width=width[1]),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5_encoder(width[0]),
        tokenizer_2=t5_tokenizer(),
    )


def wan(size: str = "tiny") -> Any:
    """Wan2.1's layout, with the scheduler it is shipped with."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    sizes = WAN[size]
    return WanPipeline(
        transformer=randomised(WanTransformer3DModel(**sizes["transformer"]), 0.1 if size == "tiny" else 0.02),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
        ),
        vae=AutoencoderKLWan(**sizes["vae"]).eval(),
        text_encoder=t5_encoder({"tiny": 16, "full": 4096}[size], umt5=True),
        tokenizer=t5_tokenizer(),
    )


def sd(size: str = "tiny", prediction: str = "epsilon") -> Any:
    """SD 1.5's layout (`prediction="v_prediction"`: SD 2.1's), with the scheduler it is shipped with."""
    from diffusers import PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    assert size == "tiny"
    return StableDiffusionPipeline(
        unet=UNet2DConditionModel(**UNET).eval(),
        scheduler=PNDMScheduler(**BETAS, skip_prk_steps=True, prediction_type=prediction),
        vae=autoencoder(TINY_VAE, scaling_factor=0.18215),
        text_encoder=clip_encoder(),
        tokenizer=clip_tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl(size: str = "tiny") -> Any:
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    assert size == "tiny"
    told = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "cross_attention_dim": 32}
    return StableDiffusionXLPipeline(
        unet=UNet2DConditionModel(**(UNET | told), projection_class_embeddings_input_dim=6 * 8 + 16).eval(),
        scheduler=EulerDiscreteScheduler(**BETAS, timestep_spacing="leading"),
        vae=autoencoder(TINY_VAE, scaling_factor=0.13025),
        text_encoder=clip_encoder(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=clip_encoder(16),
        tokenizer_2=clip_tokenizer(),
    )


PIPELINES: dict[str, Callable[..., Any]] = {"sd3": sd3, "flux": flux, "wan": wan, "sd": sd, "sdxl": sdxl}


def build(family: str, seed: int = 0, device: str = "cpu", **options: Any) -> Any:
    """A family's pipeline, its weights drawn from a seed."""
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return PIPELINES[family](**options)
