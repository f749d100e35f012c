"""Ulysses sequence parallelism (Jacobs et al. 2023): the ranks of a group share one sequence.

Each rank holds 1/N of every segment of it (text, image, each reference), and so of all activations.  Attention alone needs
the whole: two all-to-all exchanges per layer turn shares of the tokens into shares of the heads and back.  ZeRO knows nothing
of it and shards over all ranks; the mean over them of what each loses on its own tokens is the loss of the whole.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ds_flux import UserError
from ds_flux.latents import TokenShard


@dataclass(frozen=True)
class SequenceGroup:
    """The ranks that share this rank's sequences: neighbours, so that they sit in one node where N divides its ranks."""

    mesh: DeviceMesh

    @staticmethod
    def of_size(size: int) -> "SequenceGroup":
        """The group of this rank, of all that there are.  A collective; `size` divides the number of ranks."""
        shape = (torch.distributed.get_world_size() // size, 1, size)
        mesh = init_device_mesh(get_accelerator().device_name(), shape, mesh_dim_names=("dp", "ring", "ulysses"))
        return SequenceGroup(mesh["ring", "ulysses"])

    @property
    def shard(self) -> TokenShard:
        """This rank's share of a sequence."""
        return TokenShard(self.mesh["ulysses"].get_local_rank(), self.mesh.size())

    def apply(self, transformer: Any) -> None:
        """Have every attention layer exchange tokens for heads.

        Raises:
            UserError: its attention backend cannot.
        """
        config = ParallelConfig(ContextParallelConfig(ulysses_degree=self.mesh.size(), mesh=self.mesh))
        config.setup(
            torch.distributed.get_rank(),
            torch.distributed.get_world_size(),
            torch.device(self.mesh.device_type),
            mesh=self.mesh,
        )
        for processor in processors_of(transformer):
            check_backend(processor._attention_backend)
            processor._parallel_config = config

    @contextmanager
    def apart(self, transformer: Any) -> Iterator[None]:
        """Inside, each rank's calls are of whole sequences of its own."""
        processors = processors_of(transformer)
        kept = [processor._parallel_config for processor in processors]
        for processor in processors:
            processor._parallel_config = None
        yield
        for processor, config in zip(processors, kept, strict=True):
            processor._parallel_config = config

    def samples_of(self, num_samples: int) -> list[int]:
        """Which samples of a micro batch this rank encodes for the group: as many on every rank, some twice if need be."""
        shard = self.shard
        num_each = -(-num_samples // shard.size)
        return [min(shard.rank * num_each + number, num_samples - 1) for number in range(num_each)]

    def gathered(self, part: Tensor, num_samples: int) -> Tensor:
        """What the ranks made of their samples (num_each, ...) -> of all (num_samples, ...).  A collective of the group."""
        parts = [torch.empty_like(part) for _ in range(self.mesh.size())]
        torch.distributed.all_gather(parts, part.contiguous(), group=self.mesh["ulysses"].get_group())
        return torch.cat(parts)[:num_samples]


def processors_of(transformer: Any) -> list[Any]:
    """What computes attention in each layer."""
    return [vars(module)["processor"] for module in transformer.modules() if "processor" in vars(module)]


def check_backend(chosen: AttentionBackendName | None) -> None:
    """Raise UserError for an attention backend that does not exchange tokens for heads; None: diffusers' choice."""
    backend = chosen or _AttentionBackendRegistry.get_active_backend()[0]
    if not _AttentionBackendRegistry._is_context_parallel_available(backend):
        able = sorted(_AttentionBackendRegistry._supports_context_parallel)
        raise UserError(
            f"--sequence_parallel does not work with --attention_backend {backend.value}; it does with {', '.join(able)}"
        )
