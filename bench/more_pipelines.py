"""Further real diffusers pipelines with random weights, built offline: text to picture or video, and editing.

`CALLS` says what to call each tiny one with. Text encoders stay tiny at every size but for the width they answer with.

Tiny transformers have sizes at which their weights lie at multiples of 16 bytes in a saved file. Read from elsewhere
(safetensors maps the file and keeps to 8), products of one row differ in the last bit, and pictures with them.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen2VLProcessor
from transformers.processing_utils import ProcessorMixin
from transformers.utils import is_torchvision_available

from .pipelines import FLUX as FLUX_SIZES
from .pipelines import (
    FULL_VAE,
    TINY_VAE,
    WAN,
    autoencoder,
    clip_encoder,
    clip_tokenizer,
    randomised,
    t5_encoder,
    t5_tokenizer,
)

# One token each, so that the 34, 64 or 108 tokens that pipelines cut off are just their own template.
AFTER_SPACE = """
a photo of cat dog red blue house Describe the image by detailing color shape size texture quantity text spatial
relationships objects and background key features input then explain how user instruction should alter or modify
Generate new that meets requirements while maintaining consistency with original where appropriate Picture You are
helpful assistant video following aspects The main content theme Actions events behaviors temporal physical movement
changes environment light style atmosphere camera angles movements transitions used in an designed to generate
superior images degree alignment based on textual prompts AI reasons about descriptions give structured responses
focusing object actions without speculation
"""
ALONE = ["system", "user", "assistant", "Describe", "You", "color", "attribution", "'s", " (", "),"]
QWEN_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
QWEN_TOKENS += ["<|video_pad|>", "<think>", "</think>"]
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
CHAT_IN_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{{ part.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)

QWEN_IMAGE: dict[str, dict[str, Any]] = {
    "tiny": {
        "transformer": {
            "in_channels": 64,
            "out_channels": 16,
            "num_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "axes_dims_rope": (4, 6, 6),
        },
        "vae": {"base_dim": 8, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1},
        "text": {"width": 32, "heads": 4},
    },
    "full": {"transformer": {}, "vae": {}, "text": {"width": 3584, "heads": 28}},  # the class's own sizes are true
}
Z_IMAGE: dict[str, dict[str, Any]] = {
    "tiny": {
        "transformer": {
            "in_channels": 4,
            "dim": 32,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 16,
            "axes_dims": [4, 6, 6],
            "axes_lens": [512, 64, 64],
        },
        "vae": TINY_VAE,
        "width": 16,
    },
    "full": {"transformer": {"axes_lens": [1536, 512, 512]}, "vae": FULL_VAE, "width": 2560},
}
FLUX2_KLEIN: dict[str, dict[str, Any]] = {
    "tiny": {
        "transformer": {
            "in_channels": 16,
            "num_layers": 2,
            "num_single_layers": 3,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 48,
            "axes_dims_rope": (4, 4, 4, 4),
            "timestep_guidance_channels": 32,
        },
        "vae": TINY_VAE,
        "width": 16,
    },
    "full": {
        "transformer": {
            "num_layers": 5,
            "num_single_layers": 20,
            "num_attention_heads": 24,
            "joint_attention_dim": 7680,
        },
        "vae": FULL_VAE | {"latent_channels": 32},
        "width": 2560,
    },
}


class PictureProcessor(Qwen2VLProcessor):
    """Qwen2-VL's for text and pictures. Without torchvision there is no other, and it stands in that one's place."""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([self.image_token, self.video_token])
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


PictureProcessor.__module__, PictureProcessor.__name__ = "transformers", "Qwen2VLProcessor"


def stand_in_processor() -> None:
    """Have a pipeline's Qwen2-VL processor load without torchvision."""
    if not is_torchvision_available():
        sys.modules["transformers"].__dict__["Qwen2VLProcessor"] = PictureProcessor


def byte_pairs() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary, and merges that spell out the words above from their left."""
    from tokenizers.pre_tokenizers import ByteLevel

    words = [word.replace(" ", "Ġ") for word in (*(" " + word for word in AFTER_SPACE.split()), *ALONE)]
    merges = dict.fromkeys((word[:i], word[i]) for word in words for i in range(1, len(word)))
    merges |= dict.fromkeys(("Ġ" * n, "Ġ" * n) for n in (1, 2, 4))
    pieces = dict.fromkeys([*sorted(ByteLevel.alphabet()), *(left + right for left, right in merges)])
    return {piece: i for i, piece in enumerate(pieces)}, list(merges)


def qwen_tokenizer(chat: str = CHAT) -> Any:
    from transformers import Qwen2Tokenizer

    vocab, merges = byte_pairs()
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=merges, extra_special_tokens=QWEN_TOKENS[1:], model_max_length=1024, padding_side="right"
    )
    tokenizer.chat_template = chat
    return tokenizer


def qwen3_encoder(tokens: int, width: int = 16, layers: int = 2) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=tokens,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        initializer_range=0.2 if width < 100 else 0.02,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config).eval()


def qwen_vl_encoder(tokenizer: Any, width: int = 32, heads: int = 4, **vision: Any) -> Any:
    """Qwen2.5-VL with its vision tower."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    pieces = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{piece}|>") for name, piece in pieces.items()}
    tower = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": width,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(text_config=qwen_vl_text(tokenizer, width, heads), vision_config=tower | vision, **ids)
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def qwen_vl_text(tokenizer: Any, width: int, heads: int, layers: int = 2) -> dict[str, Any]:
    half = width // heads // 2
    parts = [half // 4, (half - half // 4) // 2]
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2 if width < 100 else 0.02,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [*parts, half - sum(parts)]},
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def std(size: str, tiny: float) -> float:
    return tiny if size == "tiny" else 0.02


def qwen_image(size: str = "tiny") -> Any:
    from diffusers import QwenImagePipeline

    tokenizer = qwen_tokenizer()
    return QwenImagePipeline(**qwen_parts(size, tokenizer), tokenizer=tokenizer)


def qwen_image_edit_plus(size: str = "tiny") -> Any:
    from diffusers import QwenImageEditPlusPipeline

    assert size == "tiny"
    return QwenImageEditPlusPipeline(**qwen_edit_parts())


def qwen_image_edit(size: str = "tiny") -> Any:
    from diffusers import QwenImageEditPipeline

    assert size == "tiny"
    return QwenImageEditPipeline(**qwen_edit_parts())


def qwen_edit_parts() -> dict[str, Any]:
    """A VAE of 32 pixels a latent and a vision tower of 96 a token: pictures are resized to 1024 and 384 pixels."""
    tokenizer = qwen_tokenizer()
    vae = {"base_dim": 8, "num_res_blocks": 0, "dim_mult": [1] * 6, "temperal_downsample": [False] * 3 + [True] * 2}
    vision = {"patch_size": 48, "window_size": 192}
    return qwen_parts("tiny", tokenizer, vae_sizes=vae, contrast=4.0, spread=0.5, **vision) | {
        "tokenizer": tokenizer,
        "processor": qwen_vl_processor(tokenizer, patch_size=48),
    }


def qwen_vl_processor(tokenizer: Any, patch_size: int) -> Any:
    """Without torchvision its video part cannot be, so a processor without one stands in."""
    from transformers import Qwen2VLImageProcessor

    pixels = {"shortest_edge": patch_size**2, "longest_edge": 384**2}
    parts = {
        "image_processor": Qwen2VLImageProcessor(patch_size=patch_size, size=pixels),
        "tokenizer": tokenizer,
        "chat_template": CHAT,
    }
    if not is_torchvision_available():
        return PictureProcessor(**parts)
    from transformers import Qwen2VLVideoProcessor

    return Qwen2VLProcessor(**parts, video_processor=Qwen2VLVideoProcessor(patch_size=patch_size))


def qwen_parts(
    size: str,
    tokenizer: Any,
    vae_sizes: dict[str, Any] | None = None,
    contrast: float = 3.0,
    spread: float = 0.4,
    **vision: Any,
) -> dict[str, Any]:
    """What Qwen-Image and its editors have alike. Random decoders of theirs answer nearly one grey: hence contrast."""
    from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel

    sizes = QWEN_IMAGE[size]
    vae = AutoencoderKLQwenImage(**(vae_sizes or sizes["vae"])).eval()
    if size == "tiny":
        vae.decoder.conv_out.weight.data.mul_(contrast)
    return {
        "transformer": randomised(QwenImageTransformer2DModel(**sizes["transformer"]), std(size, spread)),
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=0.9,
            base_image_seq_len=256,
            max_image_seq_len=8192,
            shift_terminal=0.02,
        ),
        "vae": vae,
        "text_encoder": qwen_vl_encoder(tokenizer, **sizes["text"], **vision),
    }


def z_image(size: str = "tiny") -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel

    sizes, tokenizer = Z_IMAGE[size], qwen_tokenizer()
    return ZImagePipeline(
        transformer=randomised(ZImageTransformer2DModel(**sizes["transformer"]), std(size, 0.15)),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flux_autoencoder(sizes["vae"]),
        text_encoder=qwen3_encoder(len(tokenizer), sizes["width"]),
        tokenizer=tokenizer,
    )


def flux2_klein(size: str = "tiny", is_distilled: bool = False) -> Any:
    """The text encoder has 28 layers, since layers 9, 18 and 27 are read."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel

    sizes, tokenizer = FLUX2_KLEIN[size], qwen_tokenizer()
    transformer = Flux2Transformer2DModel(**sizes["transformer"], guidance_embeds=False)
    return Flux2KleinPipeline(
        transformer=randomised(transformer, std(size, 0.2)),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=flux2_autoencoder(sizes["vae"]),
        text_encoder=qwen3_encoder(len(tokenizer), sizes["width"], layers=28),
        tokenizer=tokenizer,
        is_distilled=is_distilled,
    )


def flux2_autoencoder(size: dict[str, Any]) -> Any:
    from diffusers import AutoencoderKLFlux2

    blocks = len(size["block_out_channels"])
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * blocks, "up_block_types": ("UpDecoderBlock2D",) * blocks}
    return AutoencoderKLFlux2(**(size | kinds)).eval()


def wan22_a14b(size: str = "tiny") -> Any:
    from diffusers import WanPipeline

    assert size == "tiny"
    return WanPipeline(**wan_a14b_parts(0.875))


def wan_i2v(size: str = "tiny") -> Any:
    """Wan2.2 A14B's: a mask of 4 channels and the picture's latents are appended to the noise."""
    from diffusers import WanImageToVideoPipeline

    assert size == "tiny"
    return WanImageToVideoPipeline(**wan_a14b_parts(0.9, in_channels=36))


def wan22_5b(size: str = "tiny") -> Any:
    from diffusers import WanPipeline

    assert size == "tiny"
    return WanPipeline(**wan_5b_parts())


def wan22_5b_i2v(size: str = "tiny") -> Any:
    from diffusers import WanImageToVideoPipeline

    assert size == "tiny"
    return WanImageToVideoPipeline(**wan_5b_parts())


def wan_a14b_parts(boundary: float, **own: Any) -> dict[str, Any]:
    """Two experts, the second for noise below the boundary."""
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan(**(WAN["tiny"]["vae"] | {"base_dim": 8}))
    experts = {name: wan_transformer(**own) for name in ("transformer", "transformer_2")}
    return wan_parts(vae, shift=3.0) | experts | {"boundary_ratio": boundary}


def wan_5b_parts() -> dict[str, Any]:
    """A VAE of 16 pixels a latent, and a time for every token."""
    from diffusers import AutoencoderKLWan

    channels = 8
    vae = AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=channels,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
    )
    transformer = wan_transformer(in_channels=channels, out_channels=channels)
    return wan_parts(vae, shift=5.0) | {"transformer": transformer, "expand_timesteps": True}


def wan_transformer(**own: Any) -> Any:
    from diffusers import WanTransformer3DModel

    return randomised(WanTransformer3DModel(**(WAN["tiny"]["transformer"] | {"ffn_dim": 128} | own)), 0.2)


def wan_parts(vae: Any, shift: float) -> dict[str, Any]:
    from diffusers import UniPCMultistepScheduler

    return {
        "scheduler": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift),
        "vae": vae.eval(),
        "text_encoder": t5_encoder(16, umt5=True),
        "tokenizer": t5_tokenizer(),
    }


def flux_kontext(size: str = "tiny") -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxTransformer2DModel

    assert size == "tiny"
    sizes = FLUX_SIZES[size]["transformer"] | {"num_layers": 1}
    return FluxKontextPipeline(
        transformer=randomised(FluxTransformer2DModel(**sizes), 0.2),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=flux_autoencoder(TINY_VAE),
        text_encoder=clip_encoder(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5_encoder(16),
        tokenizer_2=t5_tokenizer(),
    )


def chroma(size: str = "tiny") -> Any:
    from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

    assert size == "tiny"
    transformer = ChromaTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(4, 4, 8),
        approximator_hidden_dim=32,
        approximator_layers=2,
    )
    return ChromaPipeline(
        transformer=randomised(transformer, 0.2),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        vae=flux_autoencoder(TINY_VAE),
        text_encoder=t5_encoder(16),
        tokenizer=t5_tokenizer(),
    )


def flux_autoencoder(size: dict[str, Any]) -> Any:
    return autoencoder(
        size, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1159, scaling_factor=0.3611
    )


def gemma_tokenizer() -> Any:
    from transformers import GemmaTokenizer

    words = ["▁" + word for word in AFTER_SPACE.split()]
    merges = dict.fromkeys((word[:i], word[i]) for word in words for i in range(1, len(word)))
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(code) for code in range(33, 127)] + [left + right for left, right in merges]
    return GemmaTokenizer(
        vocab={piece: i for i, piece in enumerate(dict.fromkeys(pieces))},
        merges=list(merges),
        padding_side="right",
        model_max_length=2048,
    )


def gemma_encoder(tokens: int, width: int = 16) -> Any:
    from transformers import Gemma2Config, Gemma2Model

    config = Gemma2Config(
        vocab_size=tokens,
        hidden_size=width,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    return Gemma2Model(config).eval()


def sana(size: str = "tiny") -> Any:
    from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel

    assert size == "tiny"
    transformer = SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=16,
    )
    sides = {
        "block_types": ("ResBlock", "EfficientViTBlock"),
        "block_out_channels": (8, 8),
        "layers_per_block": (1, 1),
        "qkv_multiscales": ((), (5,)),
    }
    vae = AutoencoderDC(
        latent_channels=4,
        attention_head_dim=4,
        **{f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sides.items()},
        scaling_factor=0.41407,
    )
    tokenizer = gemma_tokenizer()
    return SanaPipeline(
        transformer=randomised(transformer, 0.2),
        scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
        vae=vae.eval(),
        text_encoder=gemma_encoder(len(tokenizer)),
        tokenizer=tokenizer,
    )


def lumina2(size: str = "tiny") -> Any:
    """Four blocks in the VAE, since the pipeline counts on 8 pixels a latent."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

    assert size == "tiny"
    transformer = Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=2,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(300, 64, 64),
        cap_feat_dim=16,
    )
    tokenizer = gemma_tokenizer()
    return Lumina2Pipeline(
        transformer=randomised(transformer, 0.2),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=flux_autoencoder(TINY_VAE | {"block_out_channels": (8, 8, 8, 8)}),
        text_encoder=gemma_encoder(len(tokenizer)),
        tokenizer=tokenizer,
    )


def ltx(size: str = "tiny") -> Any:
    from diffusers import LTXPipeline

    assert size == "tiny"
    return LTXPipeline(**ltx_parts())


def ltx_i2v(size: str = "tiny") -> Any:
    from diffusers import LTXImageToVideoPipeline

    assert size == "tiny"
    return LTXImageToVideoPipeline(**ltx_parts())


def ltx_parts() -> dict[str, Any]:
    from diffusers import AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXVideoTransformer3DModel

    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        num_layers=3,
        caption_channels=16,
    )
    vae = AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=2,
    )
    return {
        "transformer": randomised(transformer, 0.2),
        "scheduler": FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.95,
            max_shift=2.05,
            base_image_seq_len=1024,
            shift_terminal=0.1,
        ),
        "vae": vae.eval(),
        "text_encoder": t5_encoder(16),
        "tokenizer": t5_tokenizer(),
    }


def hunyuan_video15(size: str = "tiny") -> Any:
    """Its glyph encoder reads bytes, and only what stands in quotation marks."""
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        FlowMatchEulerDiscreteScheduler,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )
    from transformers import ByT5Tokenizer, Qwen2_5_VLTextModel
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig

    assert size == "tiny"
    tokenizer = qwen_tokenizer()
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        text_embed_dim=32,
        text_embed_2_dim=16,
        image_embed_dim=16,
        rope_axes_dim=(4, 6, 6),
        task_type="t2v",
    )
    vae = AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(16, 16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    )
    return HunyuanVideo15Pipeline(
        transformer=randomised(transformer, 0.2),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=5.0),
        vae=vae.eval(),
        text_encoder=Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**qwen_vl_text(tokenizer, 32, 4, layers=3))).eval(),
        tokenizer=tokenizer,
        text_encoder_2=t5_encoder(16, vocab_size=384),
        tokenizer_2=ByT5Tokenizer(),
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )


def flux2(size: str = "tiny") -> Any:
    """A bare tokenizer in the place of Pixtral's processor, which needs torchvision; layers 10, 20 and 30 are read."""
    from diffusers import FlowMatchEulerDiscreteScheduler, Flux2Pipeline, Flux2Transformer2DModel
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    assert size == "tiny"
    tokenizer = qwen_tokenizer(CHAT_IN_PARTS)
    text = {
        "model_type": "mistral",
        "vocab_size": len(tokenizer),
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 31,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
    }
    tower = {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 8,
        "image_size": 32,
    }
    encoder = Mistral3ForConditionalGeneration(
        Mistral3Config(
            text_config=text,
            vision_config=tower,
            image_token_index=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
            tie_word_embeddings=True,
        )
    )
    return Flux2Pipeline(
        transformer=randomised(Flux2Transformer2DModel(**FLUX2_KLEIN[size]["transformer"]), 0.2),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=flux2_autoencoder(TINY_VAE),
        text_encoder=encoder.eval(),
        tokenizer=tokenizer,
    )


PIPELINES: dict[str, Callable[..., Any]] = {
    "qwen_image": qwen_image,
    "z_image": z_image,
    "flux2_klein": flux2_klein,
    "wan22_a14b": wan22_a14b,
    "flux_kontext": flux_kontext,
    "qwen_image_edit_plus": qwen_image_edit_plus,
    "chroma": chroma,
    "sana": sana,
    "ltx": ltx,
    "lumina2": lumina2,
    "hunyuan_video15": hunyuan_video15,
    "flux2": flux2,
    "wan22_5b": wan22_5b,
    "wan_i2v": wan_i2v,
    "wan22_5b_i2v": wan22_5b_i2v,
    "ltx_i2v": ltx_i2v,
    "qwen_image_edit": qwen_image_edit,
}
TEXT = {"max_sequence_length": 32}
SMALL = {"height": 16, "width": 16}
PICTURE = {"height": 32, "width": 32}
VIDEO = PICTURE | {"num_frames": 5}
CALLS: dict[str, dict[str, Any]] = {
    "qwen_image": PICTURE | TEXT,
    "z_image": SMALL | TEXT,
    "flux2_klein": SMALL | TEXT,
    "wan22_a14b": VIDEO | TEXT,
    "flux_kontext": SMALL | TEXT | {"max_area": 256, "_auto_resize": False},
    "qwen_image_edit_plus": {"height": 128, "width": 128} | TEXT,
    "chroma": SMALL | TEXT,
    "sana": PICTURE | TEXT | {"use_resolution_binning": False},
    "ltx": VIDEO | TEXT,
    "lumina2": PICTURE | {"max_sequence_length": 64},  # its system prompt takes half of them
    "hunyuan_video15": SMALL | {"num_frames": 5},
    "flux2": SMALL | {"max_sequence_length": 64},  # its system message takes half of them
    "wan22_5b": {"height": 64, "width": 64, "num_frames": 5} | TEXT,
    "wan_i2v": VIDEO | TEXT,
    "wan22_5b_i2v": {"height": 64, "width": 64, "num_frames": 5} | TEXT,
    "ltx_i2v": VIDEO | TEXT,
    "qwen_image_edit": {"height": 128, "width": 128} | TEXT,
}


def build(family: str, seed: int = 0, device: str = "cpu", **options: Any) -> Any:
    """A family's pipeline, its weights drawn from a seed."""
    stand_in_processor()
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return PIPELINES[family](**options)
