"""Real diffusers pipelines of true size with random weights, built offline, for timing."""

from typing import Any

import torch

WORDS = ["a", "photo", "of", "cat", "dog", "red", "blue", "house"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"

SD35_MEDIUM = {
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
    "vae": {"block_out_channels": (128, 256, 512, 512), "latent_channels": 16, "layers_per_block": 2},
    "projections": (768, 1280),
}


def _tokenizer() -> Any:
    from transformers import CLIPTokenizer

    pieces = ["<|startoftext|>", "<|endoftext|>", *[word + "</w>" for word in WORDS], *LETTERS]
    pieces += [letter + "</w>" for letter in LETTERS if letter + "</w>" not in pieces]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=16)


def _text_encoder(projection: int) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
        projection_dim=projection,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModelWithProjection(config).eval()


def sd3_pipeline(size: dict[str, Any] = SD35_MEDIUM, seed: int = 0, device: str = "cpu") -> Any:
    """A StableDiffusion3Pipeline without T5. The text encoders are tiny at every size: they run once a prompt."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    torch.manual_seed(seed)
    blocks = len(size["vae"]["block_out_channels"])
    with torch.device(device):
        transformer = SD3Transformer2DModel(**size["transformer"])
        # Fresh SD3 blocks end in zeros; without this the velocity would be constant and nothing could be compared.
        for parameter in transformer.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02)
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * blocks,
            up_block_types=("UpDecoderBlock2D",) * blocks,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.0609,
            scaling_factor=1.5305,
            **size["vae"],
        )
    return StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae.eval(),
        text_encoder=_text_encoder(size["projections"][0]),
        tokenizer=_tokenizer(),
        text_encoder_2=_text_encoder(size["projections"][1]),
        tokenizer_2=_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )
