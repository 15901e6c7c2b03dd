"""The scenes pipeline with fresh weights: every part a real one of diffusers or transformers, only small."""

import json
from typing import Any

from .grammar import all_scenes, describe
from .render import SIDE

TEXT_WIDTH, TEXT_TOKENS = 64, 16
LATENT_CHANNELS, LATENT_SIDE = 4, SIDE // 4
SHIFT = 3.0

VAE: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "block_out_channels": (8, 16, 32),
    "layers_per_block": 1,
    "norm_num_groups": 1,  # a group of few channels, normalised over the picture, would lose the picture's colours
    "latent_channels": LATENT_CHANNELS,
    "sample_size": SIDE,
    "mid_block_add_attention": False,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "scaling_factor": 1.0,
    "shift_factor": 0.0,
}
TRANSFORMER: dict[str, Any] = {
    "sample_size": LATENT_SIDE,
    "patch_size": 4,  # sixteen tokens a picture: a forward is a third of what sixty-four would cost on a CPU
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "num_layers": 5,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": 2 * TEXT_WIDTH,
    "caption_projection_dim": 128,
    "pooled_projection_dim": 2 * TEXT_WIDTH,
    "pos_embed_max_size": LATENT_SIDE // 4,
    "qk_norm": "rms_norm",
}


def build() -> Any:
    """A StableDiffusion3Pipeline without T5."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    absent: dict[str, Any] = {"text_encoder_3": None, "tokenizer_3": None}
    return StableDiffusion3Pipeline(
        transformer=SD3Transformer2DModel(**TRANSFORMER),
        # The last noise level above zero is 0.1 at any number of steps: every step of a short schedule does work.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT, shift_terminal=0.1),
        vae=AutoencoderKL(**VAE),
        text_encoder=_text_encoder(),
        tokenizer=tokenizer(),
        text_encoder_2=_text_encoder(),
        tokenizer_2=tokenizer(),
        **absent,
    )


def tokenizer() -> Any:
    """A CLIP tokenizer in which every word of the grammar is one token; other words are spelt in letters."""
    from tokenizers import Tokenizer, models, trainers
    from transformers import CLIPTokenizer

    words = sorted({word for scene in all_scenes().tolist() for word in describe(scene).split()})
    letters = [chr(ord("a") + i) for i in range(26)]
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    end = {"end_of_word_suffix": "</w>", "show_progress": False}
    bpe.train_from_iterator(words, trainers.BpeTrainer(vocab_size=4096, initial_alphabet=letters, **end))
    model: dict[str, Any] = json.loads(bpe.to_str())["model"]
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    pieces += [piece for piece in model["vocab"] if piece not in pieces]
    merges: Any = [tuple(pair) for pair in model["merges"]]
    return CLIPTokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, model_max_length=TEXT_TOKENS
    )


def _text_encoder() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer()),
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=TEXT_TOKENS,
        projection_dim=TEXT_WIDTH,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModelWithProjection(config)
