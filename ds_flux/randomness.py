"""Generators keyed by (seed, sample id, visit): a sample's identity decides everything random about it.

`visit` counts how often the run has seen the sample.  Never rank, worker, step or place in the batch: so a run is the same
on any number of processes, with any split into micro batches, and after a resume.
"""

import hashlib

import torch


def sample_generator(seed: int, sample_id: int, visit: int, purpose: str) -> torch.Generator:
    """A CPU generator of its own for each purpose ("noise", "sigma", "crop", ...).

    One stream for each purpose, so that a new draw for one of them does not move the others.  CPU, because the streams of
    accelerators differ between makers.
    """
    return keyed_generator("sample", seed, sample_id, visit, purpose)


def uniform(seed: int, key: tuple[int, int], purpose: str, num: int = 1) -> list[float]:
    """Numbers in [0, 1) that a sample's identity (sample id, visit) decides."""
    return torch.rand(num, generator=sample_generator(seed, *key, purpose)).tolist()


def epoch_order(seed: int, epoch: int, num_samples: int) -> torch.Tensor:
    """The order of an epoch, a permutation of 0..num_samples-1."""
    return torch.randperm(num_samples, generator=keyed_generator("epoch", seed, epoch))


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded by a hash of the key, so that neighbouring keys give unrelated streams."""
    return torch.Generator().manual_seed(key_seed(*key))


def key_seed(*key: int | str) -> int:
    """A seed of 63 bits for a key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
