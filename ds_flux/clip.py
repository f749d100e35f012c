"""CLIP score: how well images show what their prompts say (Hessel et al. 2021): 100 times the cosine of their embeddings.

The mean over all images is clamped at 0, as torchmetrics' `CLIPScore` does.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

from ds_flux import UserError, runtime
from ds_flux.config import ModelConfig
from ds_flux.models import fetch

WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class Clip:
    """A CLIP, whole on this rank, once `load` was called."""

    folder: Path
    tokenizer: Any
    processor: Any
    """resizes as CLIP was trained with: by PIL, whether torchvision is there or not"""
    num_tokens: int
    """most that a prompt may have"""

    def load(self) -> Any:
        """The model, in fp32.  Raises UserError where its weights cannot be read."""
        try:
            model = CLIPModel.from_pretrained(self.folder, dtype=torch.float32)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(f"--clip_model {self.folder}: {' '.join(str(error).split())[:300]}") from None
        return model.to(runtime.device()).requires_grad_(False).eval()

    @torch.no_grad()
    def scores(self, model: Any, images: list[Image.Image], prompts: list[str]) -> Tensor:
        """Of each image and its prompt (B,), fp64, in -100 .. 100."""
        text = self.tokenizer(prompts, padding=True, truncation=True, max_length=self.num_tokens, return_tensors="pt")
        pixels = self.processor(images=images, return_tensors="pt")
        said = model(**text.to(runtime.device()), **pixels.to(runtime.device()))
        return 100 * (said.image_embeds * said.text_embeds).sum(-1).double().cpu()

    def num_cut(self, prompts: list[str]) -> int:
        """How many of the prompts are longer than CLIP takes: their ends do not count."""
        return sum(len(ids) > self.num_tokens for ids in self.tokenizer(prompts, verbose=False)["input_ids"])


def find(name: str) -> Clip:
    """The model of a folder or hub id, of which all but the weights is read.

    Raises:
        UserError: it is nowhere, or is something else than a CLIP.
    """
    folder = folder_of(name)
    try:
        config = CLIPConfig.from_pretrained(folder)
        tokenizer, processor = CLIPTokenizer.from_pretrained(folder), CLIPImageProcessorPil.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--clip_model {name} cannot be read: {' '.join(str(error).split())[:300]}") from None
    return Clip(folder, tokenizer, processor, config.text_config.max_position_embeddings)


def folder_of(name: str) -> Path:
    """Where it lies, or was fetched to, with weights in it.  Raises UserError."""
    folder = Path(name).expanduser()
    if not folder.is_dir() and (name.startswith((".", "/", "~")) or name.count("/") != 1):
        raise UserError(f"--clip_model {name}: no such folder")
    for weights in WEIGHTS:
        place = folder if folder.is_dir() else fetch(name, ["*.json", "*.txt", weights], ModelConfig())
        if any(place.glob(weights)):
            return place
    raise UserError(f"--clip_model {name} has no {' or '.join(WEIGHTS)}")
