"""Files in the layouts that rewards are published in, with random weights: tiny for tests, of true size for timing."""

import gzip
import json
from importlib.metadata import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VIT_H = {
    "vision": {"width": 1280, "layers": 32, "patch": 14, "side": 224},
    "text": {"width": 1024, "layers": 24},
    "embedding": 1024,
}
TINY = {
    "vision": {"width": 32, "layers": 2, "patch": 14, "side": 56},
    "text": {"width": 16, "layers": 2},
    "embedding": 16,
}
BLIP = {"vision": {"width": 1024, "layers": 24, "patch": 16, "side": 224}, "text": {"width": 768, "layers": 12}}
TINY_BLIP = {"vision": {"width": 32, "layers": 2, "patch": 16, "side": 32}, "text": {"width": 24, "layers": 2}}
VOCABULARY, BERT_VOCABULARY = 49_408, 30_524
HEAD = (1024, 128, 64, 16, 1)


def draw(seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A source of random tensors whose products keep their size."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> Tensor:
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        values = torch.randn(*shape, generator=generator) * scale
        return (values + 1 if len(shape) == 1 and shape[0] > 1 else values).to(dtype)

    return tensor


def open_clip(sizes: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """A CLIP under open_clip's names, as HPS-v2's file holds it under `state_dict`."""
    tensor, vision, text, embedding = draw(seed, dtype), sizes["vision"], sizes["text"], sizes["embedding"]
    width, patch = vision["width"], vision["patch"]
    found = {
        "positional_embedding": tensor(77, text["width"]),
        "text_projection": tensor(text["width"], embedding),
        "logit_scale": torch.tensor(4.6052, dtype=dtype),
        "token_embedding.weight": tensor(VOCABULARY, text["width"]),
        "ln_final.weight": tensor(text["width"]),
        "ln_final.bias": tensor(text["width"]) - 1,
        "visual.class_embedding": tensor(width),
        "visual.positional_embedding": tensor((vision["side"] // patch) ** 2 + 1, width),
        "visual.proj": tensor(width, embedding),
        "visual.conv1.weight": tensor(width, 3, patch, patch) / patch,
    }
    for name in ("visual.ln_pre", "visual.ln_post"):
        found |= {f"{name}.weight": tensor(width), f"{name}.bias": tensor(width) - 1}
    for prefix, tower in (("visual.transformer", vision), ("transformer", text)):
        for layer in range(tower["layers"]):
            found |= _block(f"{prefix}.resblocks.{layer}", tower["width"], tensor)
    return found


def _block(prefix: str, width: int, tensor: Any) -> dict[str, Tensor]:
    shapes = {
        "attn.in_proj_weight": (3 * width, width),
        "attn.in_proj_bias": (3 * width,),
        "attn.out_proj.weight": (width, width),
        "attn.out_proj.bias": (width,),
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "mlp.c_fc.weight": (4 * width, width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (width, 4 * width),
        "mlp.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
    }
    found = {f"{prefix}.{name}": tensor(*shape) for name, shape in shapes.items()}
    return {name: values - 1 if name.endswith("bias") else values for name, values in found.items()}


def head(prefix: str, width: int, seed: int = 0) -> dict[str, Tensor]:
    """Five linear layers, numbered as with dropout between them."""
    tensor, found, widths = draw(seed), {}, (width, *HEAD)
    for layer, before, after in zip((0, 2, 4, 6, 7), widths, widths[1:], strict=False):
        found |= {
            f"{prefix}{layer}.weight": tensor(after, before),
            f"{prefix}{layer}.bias": tensor(after) - int(after > 1),
        }
    return found


def image_reward(sizes: dict[str, Any], seed: int = 0, words: int = BERT_VOCABULARY) -> dict[str, Tensor]:
    """BLIP's picture and text parts and the head, under ImageReward's names."""
    tensor, vision, text = draw(seed), sizes["vision"], sizes["text"]
    wide, narrow, patch = vision["width"], text["width"], vision["patch"]

    def layer(name: str, out: int, into: int) -> dict[str, Tensor]:
        return {f"{name}.weight": tensor(out, into), f"{name}.bias": tensor(out) - 1}

    def norm(name: str, width: int) -> dict[str, Tensor]:
        return {f"{name}.weight": tensor(width), f"{name}.bias": tensor(width) - 1}

    eye, read = "blip.visual_encoder", "blip.text_encoder"
    found = {
        f"{eye}.cls_token": tensor(1, 1, wide),
        f"{eye}.pos_embed": tensor(1, (vision["side"] // patch) ** 2 + 1, wide),
        f"{eye}.patch_embed.proj.weight": tensor(wide, 3, patch, patch) / patch,
        f"{eye}.patch_embed.proj.bias": tensor(wide) - 1,
        f"{read}.embeddings.word_embeddings.weight": tensor(words, narrow),
        f"{read}.embeddings.position_embeddings.weight": tensor(512, narrow),
        f"{read}.embeddings.position_ids": torch.arange(512)[None],
    }
    found |= norm(f"{eye}.norm", wide) | norm(f"{read}.embeddings.LayerNorm", narrow)
    for i in range(vision["layers"]):
        block = f"{eye}.blocks.{i}"
        found |= norm(f"{block}.norm1", wide) | norm(f"{block}.norm2", wide)
        found |= layer(f"{block}.attn.qkv", 3 * wide, wide) | layer(f"{block}.attn.proj", wide, wide)
        found |= layer(f"{block}.mlp.fc1", 4 * wide, wide) | layer(f"{block}.mlp.fc2", wide, 4 * wide)
    for i in range(text["layers"]):
        block = f"{read}.encoder.layer.{i}"
        for kind, source in (("attention", narrow), ("crossattention", wide)):
            found |= layer(f"{block}.{kind}.self.query", narrow, narrow)
            found |= layer(f"{block}.{kind}.self.key", narrow, source)
            found |= layer(f"{block}.{kind}.self.value", narrow, source)
            found |= layer(f"{block}.{kind}.output.dense", narrow, narrow)
            found |= norm(f"{block}.{kind}.output.LayerNorm", narrow)
        found |= layer(f"{block}.intermediate.dense", 4 * narrow, narrow)
        found |= layer(f"{block}.output.dense", narrow, 4 * narrow) | norm(f"{block}.output.LayerNorm", narrow)
    found |= layer("blip.vision_proj", 256, wide) | layer("blip.text_proj", 256, narrow)
    return found | head("mlp.layers.", narrow, seed)


def clip_folder(folder: Path, side: int = 56, activation: str = "quick_gelu", tiny: bool = True) -> Path:
    """A CLIP as transformers saves it: tiny, or OpenAI's ViT-L/14."""
    from transformers import CLIPConfig, CLIPModel

    torch.manual_seed(0)
    if tiny:
        text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
        vision |= {"patch_size": 14, "image_size": side}
        width = 16
    else:
        text = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
        vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
        vision |= {"patch_size": 14, "image_size": 224}
        width = 768
    text |= {"vocab_size": VOCABULARY, "eos_token_id": VOCABULARY - 1, "bos_token_id": VOCABULARY - 2}
    config = CLIPConfig(
        text_config=text | {"hidden_act": activation},
        vision_config=vision | {"hidden_act": activation},
        projection_dim=width,
    )
    model = CLIPModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # fresh ones answer nearly the same to everything
            if tiny and parameter.ndim > 1:
                parameter.normal_(std=0.7 * parameter.shape[-1] ** -0.5 if "embedding" not in name else 0.5)
    model.save_pretrained(folder)
    return folder


def clip_tokenizer(folder: Path) -> Path:
    """CLIP's own vocabulary, from a package that carries it."""
    from transformers import CLIPTokenizer

    packed = next(file for file in files("open_clip_torch") or [] if file.name == "bpe_simple_vocab_16e6.txt.gz")
    lines = gzip.decompress(packed.read_binary()).decode().split("\n")
    merges = [tuple(line.split()) for line in lines[1 : 49152 - 256 - 2 + 1]]
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(code) for code in shown] + [chr(256 + i) for i in range(256 - len(shown))]
    pieces = [*letters, *(letter + "</w>" for letter in letters), *("".join(merge) for merge in merges)]
    pieces += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=77).save_pretrained(folder)
    return folder


def bert_tokenizer(folder: Path) -> Path:
    """A small vocabulary in BERT's form."""
    from transformers import BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "kite", "over", "grey", "harbour", "##s", "!"]
    BertTokenizer(vocab={word: place for place, word in enumerate(words)}).save_pretrained(folder)
    return folder


QUESTION = """
Rate this clip.

Picture: <|VQ_reward|>
END
Movement: <|MQ_reward|>
END
It should show - {text_prompt}
Fit: <|TA_reward|>
END
"""
CHAT = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n"
    "{% for part in m.content %}{% if part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad", "video_pad"]
QWEN_2B = {
    "model_type": "qwen2_vl",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
    "vocab_size": 151_660,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "vision_config": {
        "model_type": "qwen2_vl",
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 1536,
        "num_heads": 16,
        "mlp_ratio": 4,
        "patch_size": 14,
        "in_chans": 3,
    },
}


def qwen_tokenizer() -> Any:
    """A small vocabulary in Qwen2-VL's form, with its special tokens."""
    from transformers import Qwen2Tokenizer

    letters = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
    merges = [("Ġ", "d"), ("o", "g"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġd", "og"), (".", "Ċ"), ("-", "Ġ")]
    words = [*letters, *("".join(merge) for merge in merges)]
    tokenizer = Qwen2Tokenizer({word: i for i, word in enumerate(words)}, merges, chat_template=CHAT)
    tokenizer.add_tokens([f"<|{name}|>" for name in SPECIAL], special_tokens=True)
    return tokenizer


def video_align(folder: Path) -> dict[str, str]:
    """VideoAlign at its true size, its LoRA merged; returns the reward's settings."""
    from transformers import Qwen2VLConfig, Qwen2VLModel

    checkpoint, backbone = folder / "videoalign", folder / "qwen"
    (checkpoint / "checkpoint-1").mkdir(parents=True)
    qwen_tokenizer().save_pretrained(backbone)
    (backbone / "config.json").write_text(json.dumps(QWEN_2B))
    with torch.device("meta"):
        shapes = {name: t.shape for name, t in Qwen2VLModel(Qwen2VLConfig.from_dict(QWEN_2B)).state_dict().items()}
    tensor = draw(0, torch.bfloat16)
    tensors = {f"base_model.model.model.{name}": tensor(*shape) for name, shape in shapes.items()}
    tensors["base_model.model.rm_head.weight"] = tensor(1, QWEN_2B["hidden_size"])
    torch.save(tensors, checkpoint / "checkpoint-1" / "model.pth")
    (checkpoint / "prompt_template.py").write_text(f'DETAILED_PROMPT_WITH_SPECIAL_TOKEN = """{QUESTION}"""\n')
    return {"path": str(checkpoint), "backbone": str(backbone), "tokenizer": ""}
