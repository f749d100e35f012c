"""Encoded images on disk, one file for each sample."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True)
class LatentCache:
    """{sample id: latents of its image and of its references}; each sample is written once, by one rank."""

    folder: Path

    def clear(self) -> None:
        """Begin with nothing."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def write(self, sample: int, latents: list[Tensor]) -> None:
        """Image first, then references, each (C, H, W)."""
        named = {str(number): tensor.cpu().contiguous() for number, tensor in enumerate(latents)}
        save_file(named, self.folder / f"{sample}.safetensors")

    def read(self, sample: int) -> tuple[Tensor, ...]:
        """What was written, in its order, fp32."""
        stored = load_file(self.folder / f"{sample}.safetensors")
        return tuple(stored[str(number)].to(torch.float32) for number in range(len(stored)))
