"""Tiny real pipelines, built offline from the library's own classes with random weights."""

from pathlib import Path

import torch

WORDS = ["a", "photo", "of", "cat", "dog", "red", "blue", "house"]


def _tokenizer():
    from transformers import CLIPTokenizer

    pieces = ["<|startoftext|>", "<|endoftext|>", *[w + "</w>" for w in WORDS], *"abcdefghijklmnopqrstuvwxyz"]
    pieces += [letter + "</w>" for letter in "abcdefghijklmnopqrstuvwxyz" if letter + "</w>" not in pieces]
    return CLIPTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], model_max_length=16)


def _text_encoder(projection: int):
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


def tiny_sd3(folder: Path, seed: int = 0) -> Path:
    """A StableDiffusion3Pipeline without T5: 16×16 latents at 32 px, saved to `folder`."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    torch.manual_seed(seed)
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=16,
    )
    # Fresh SD3 blocks end in zeros; without this the velocity would be constant and nothing could be compared.
    for parameter in transformer.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        latent_channels=4,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5035,
    )
    pipeline = StableDiffusion3Pipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae.eval(),
        text_encoder=_text_encoder(16),
        tokenizer=_tokenizer(),
        text_encoder_2=_text_encoder(16),
        tokenizer_2=_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )
    pipeline.save_pretrained(folder)
    return folder
