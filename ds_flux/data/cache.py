"""Encoded images on disk, one file for each sample."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

TROUBLE = "trouble"


@dataclass(frozen=True)
class LatentCache:
    """{sample id: latents of its image and of its references}; each sample is written once, by one rank."""

    folder: Path

    def clear(self) -> None:
        """Begin with nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def write(self, sample: int, latents: list[Tensor], trouble: str | None) -> None:
        """Image first, then references, each (C, H, W); and why the sample cannot be used, if it cannot."""
        named = {str(number): tensor.cpu().contiguous() for number, tensor in enumerate(latents)}
        save_file(named, self.folder / f"{sample}.safetensors", {TROUBLE: trouble} if trouble else None)

    def read(self, sample: int) -> tuple[tuple[Tensor, ...], str | None]:
        """What was written, in its order, fp32."""
        with safe_open(self.folder / f"{sample}.safetensors", "pt") as stored:
            latents = tuple(stored.get_tensor(str(number)).to(torch.float32) for number in range(len(stored.keys())))
            return latents, (stored.metadata() or {}).get(TROUBLE)
