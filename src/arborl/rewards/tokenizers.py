"""Text made ready for a network: CLIP's vocabulary, wherever it lies, and the cleaning that HPS-v2 was trained with."""

import html
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import ftfy
import torch
from jaxtyping import Int
from torch import Tensor

from ..core.errors import InputError
from ..tools.quiet import quiet_libraries
from .files import Weights, from_hub

VOCABULARY, START, END, LENGTH = 49_408, 49_406, 49_407, 77
CLIP_TOKENIZER = Weights(hub="openai/clip-vit-large-patch14")
FILES = ("tokenizer.json", "vocab.json", "vocab.txt")


def cleaned(text: str) -> str:
    """As HPS-v2 (and open_clip) clean a prompt: mend mis-decoded letters and typographic quotes, undo HTML twice, one
    space for any white space, lower case.
    """
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return " ".join(text.split()).lower()


class ClipTokens:
    """Texts to 77 ids each: start, the text cut to what fits, end, then zeros (which nothing looks at)."""

    def __init__(self, key: str, given: str = "", beside: Path | None = None, pipeline: str = "") -> None:
        """Looks in the place that is `given`; else beside the weights, in the pipeline that is trained, on the hub."""
        self.tokenizer: Any = None
        if given:
            self.tokenizer = self._load(tokenizer_folder(key, given, CLIP_TOKENIZER))
            if self.tokenizer is None:
                raise InputError(key, given, f"is not CLIP's tokenizer, of {VOCABULARY} tokens", CLIP_TOKENIZER.hub)
            return
        own = Path(pipeline) / "tokenizer" if pipeline and Path(pipeline).is_dir() else _cached(pipeline)
        found = (self._load(folder) for folder in (beside, own) if folder is not None)
        self.tokenizer = next((tokenizer for tokenizer in found if tokenizer is not None), None)
        if self.tokenizer is None:
            with suppress(InputError):
                self.tokenizer = self._load(tokenizer_folder(key, "", CLIP_TOKENIZER))
        if self.tokenizer is None:
            problem = "CLIP's tokenizer is neither in the pipeline that is trained nor in the hub's cache"
            raise InputError(key, None, problem, f"a folder (any SD, SD3 or FLUX pipeline's), or {CLIP_TOKENIZER.hub}")

    def __call__(self, texts: Sequence[str], clean: bool = False) -> Int[Tensor, "texts 77"]:
        texts = [cleaned(text) if clean else text for text in texts]
        rows = self.tokenizer(texts, truncation=True, max_length=LENGTH)["input_ids"]
        return torch.tensor([[*row, *[0] * (LENGTH - len(row))] for row in rows])

    def _load(self, folder: Path) -> Any:
        """CLIP's tokenizer in a folder; None where there is none, or another."""
        if not any((folder / name).is_file() for name in FILES):
            return None
        with quiet_libraries():
            from transformers import CLIPTokenizer

            try:
                tokenizer = CLIPTokenizer.from_pretrained(folder)
            except Exception:  # noqa: BLE001 (of another kind, or damaged: the tokenizers library raises just this)
                return None
        whole = len(tokenizer) == VOCABULARY and (tokenizer.bos_token_id, tokenizer.eos_token_id) == (START, END)
        return tokenizer if whole else None


def tokenizer_folder(key: str, given: str, usual: Weights) -> Path:
    """The folder that a reward's `tokenizer` means: one with a tokenizer's files, a pipeline, or a hub id."""
    path = Path(given).expanduser()
    for folder in (path, path / "tokenizer"):
        if given and any((folder / name).is_file() for name in FILES):
            return folder
    if given and (path.exists() or path.is_absolute() or given.count("/") != 1):
        raise InputError(key, given, "there is no tokenizer", f"a folder with {' or '.join(FILES)}, or {usual.hub}")
    patterns = ["tokenizer*.json", "vocab.*", "merges.txt", "special_tokens_map.json"]
    folder = from_hub(given or usual.hub, patterns, fetch=bool(given))
    if isinstance(folder, Path) and any((folder / name).is_file() for name in FILES):
        return folder
    raise usual.missing(key, given, "" if isinstance(folder, Path) else folder)


def _cached(pipeline: str) -> Path | None:
    """The tokenizer of a pipeline in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache

    if pipeline.count("/") != 1:
        return None
    for name in FILES:
        try:
            found = try_to_load_from_cache(pipeline, f"tokenizer/{name}")
        except ValueError:  # not a hub id
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None
