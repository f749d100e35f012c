"""Encoded images and prompts in a store: which record a sample needs, and how it is read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_flux.data.schedule import SampleKey
from ds_flux.data.store import Store, Writer

TROUBLE, SPREAD = "trouble", "spread"


@dataclass(frozen=True)
class LatentCache:
    """{sample: latents of its image and of its references}."""

    store: Store
    each_visit: bool = False
    """a record for each visit of a sample, with the crop and flip of that visit; else one for all of them"""

    def name(self, key: SampleKey) -> str:
        """What the record of a visit is called."""
        return f"{key[0]} {key[1]}" if self.each_visit else str(key[0])

    def write(
        self,
        writer: Writer,
        key: SampleKey,
        fingerprint: str,
        latents: list[Tensor],
        spread: Tensor | None,
        trouble: str | None,
    ) -> None:
        """Image first, then references, each (C, H, W).

        Args:
            spread: of the image's latents, where they are drawn anew for each visit.
            trouble: why the sample cannot be used, if it cannot.
        """
        named = {str(number): tensor for number, tensor in enumerate(latents)}
        if spread is not None:
            named[SPREAD] = spread
        if trouble:
            named[TROUBLE] = torch.frombuffer(bytearray(trouble.encode()), dtype=torch.uint8)
        writer.add(self.name(key), fingerprint, named)

    def read(self, key: SampleKey) -> tuple[tuple[Tensor, ...], Tensor | None, str | None]:
        """What was written: latents in their order, spread, trouble."""
        record = dict(self.store.read(self.name(key)))
        trouble, spread = record.pop(TROUBLE, None), record.pop(SPREAD, None)
        latents = tuple(record[str(number)].to(torch.float32) for number in range(len(record)))
        return latents, spread, None if trouble is None else bytes(trouble.tolist()).decode()


@dataclass(frozen=True)
class TextCache:
    """{prompt: its features}, by the transformer's argument names."""

    store: Store
    arguments: dict[str, str]
    """{text encoder: the argument its features go to}"""

    def read(self, prompts: dict[str, list[str]]) -> dict[str, Tensor]:
        """{argument: (B, ...)} of one prompt for each sample and text encoder."""
        return {
            argument: torch.stack([self.store.read(prompt)[argument] for prompt in prompts[encoder]])
            for encoder, argument in self.arguments.items()
        }
