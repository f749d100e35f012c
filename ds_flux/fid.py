"""FID: how far the images of a model are from another set, by what Inception sees in them (Heusel et al. 2017).

Features and figure are those of torch-fidelity's `inception-v3-compat`: TensorFlow's weights of 2015, its resize without
antialiasing, 2048 features.  torchmetrics gives the same with `antialias=False`.
"""

import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ds_flux import UserError, runtime
from ds_flux.checkpoint import only_weights
from ds_flux.manifest import write_atomically

VARIANT = "inception-v3-compat"
NUM_FEATURES = 2048
FEW = 10_000
"""of fewer images it comes out too high: compare only figures of equally many"""


def check_is_installed() -> None:
    """Raise UserError where torch-fidelity is missing."""
    if importlib.util.find_spec("torch_fidelity") is None:
        raise UserError(
            "FID needs torch-fidelity, which is not installed: pip install 'ds_flux[evaluate]', or without the "
            "torchvision that it asks for and is not used here: pip install --no-deps torch-fidelity"
        )


@contextmanager
def bare_package(name: str) -> Iterator[None]:
    """Inside, modules of a package can be imported without its `__init__`, which may ask for more than they need.

    torch-fidelity's imports torchvision, for its other networks; one that was built for another torch breaks transformers.
    """
    spec = importlib.util.find_spec(name)
    before = sys.modules.get(name)
    if before is None:
        sys.modules[name] = importlib.util.module_from_spec(spec)  # it knows where its modules are, and has not run
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]


@dataclass(frozen=True)
class Inception:
    """The network, whole on this rank: 0.1 GB."""

    network: Any
    fingerprint: str
    """of its weights: statistics of others mean nothing beside these"""

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Images (B, 3, height, width), uint8 -> (B, 2048), fp64, on the CPU."""
        (features,) = self.network(images.to(runtime.device()))
        return features.double().cpu()


def load_inception(path: Path) -> Inception:
    """The network with weights of a local file, in host memory.

    Args:
        path: `pt_inception-2015-12-05-6726825d.pth` as torch-fidelity and pytorch-fid publish it.

    Raises:
        UserError: the file is absent, something else, or carries code.
    """
    with bare_package("torch_fidelity"):
        from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
    if not path.is_file():
        raise UserError(f"--fid_weights {path}: no such file; it is never fetched")
    try:
        with only_weights():
            network = FeatureExtractorInceptionV3(VARIANT, [str(NUM_FEATURES)], str(path))
    except (RuntimeError, OSError, EOFError, LookupError, TypeError, ValueError, AttributeError, UnpicklingError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"--fid_weights {path} does not hold the weights of {VARIANT}: {reason}") from None
    return Inception(network, fingerprint_of(network.state_dict()))


def fingerprint_of(weights: dict[str, Tensor]) -> str:
    """The identity of all elements, whatever file they come from."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Statistics:
    """What FID knows of a set of images."""

    num_images: int
    mean: Tensor
    """(2048,), fp64"""
    covariance: Tensor
    """(2048, 2048), fp64, unbiased"""
    weights: str
    """fingerprint of those that made the features"""
    size: str
    """of the images in pixels, as `width x height`"""

    def save(self, path: Path) -> None:
        """Write them as safetensors.  Raises UserError where that cannot be."""
        tensors = {"mean": self.mean, "covariance": self.covariance, "num_images": torch.tensor(self.num_images)}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, save(tensors, {"variant": VARIANT, "weights": self.weights, "size": self.size}))
        except OSError as error:
            raise UserError(f"--save_fid_statistics {path} cannot be written: {error.strerror}") from None

    @staticmethod
    def read(path: Path, weights: str) -> "Statistics":
        """Those that `save` wrote.

        Args:
            weights: fingerprint of those that make the features they are to be compared with.

        Raises:
            UserError: the file is absent or something else, or its features were made by other weights.
        """
        try:
            with safe_open(path, "pt") as file:
                facts = file.metadata() or {}
                mean, covariance, num_images = (file.get_tensor(name) for name in ("mean", "covariance", "num_images"))
            found = Statistics(int(num_images), mean, covariance, facts["weights"], facts["size"])
        except (OSError, SafetensorError, KeyError) as error:
            raise UserError(f"--fid_statistics {path} is no file that --save_fid_statistics wrote: {error}") from None
        if found.weights != weights:
            raise UserError(
                f"--fid_statistics {path} were made by other weights than those of --fid_weights (fingerprint {found.weights}, "
                f"these have {weights}): make them anew with --fid_dataset"
            )
        return found


def statistics(inception: Inception, batches: Iterable[Tensor], size: str) -> Statistics:
    """Of the images of all ranks together.  A collective, at its end.

    Args:
        batches: this rank's images, each (B, 3, height, width), uint8; there may be none.

    Raises:
        UserError: there are fewer than two.
    """
    num, total, products = 0, torch.zeros(NUM_FEATURES).double(), torch.zeros(NUM_FEATURES, NUM_FEATURES).double()
    with runtime.together("looking at images for FID"):
        for images in batches:
            features = inception.features(images)
            num += len(features)
            total += features.sum(0)
            products += features.T @ features
    num = int(runtime.all_reduce_sum(torch.tensor([float(num)]).double()))
    if num < 2:
        raise UserError(f"FID needs two images or more on either side, and there is {num}")
    mean, products = runtime.all_reduce_sum(total) / num, runtime.all_reduce_sum(products)
    return Statistics(num, mean, (products - num * torch.outer(mean, mean)) / (num - 1), inception.fingerprint, size)


def distance(one: Statistics, other: Statistics) -> float:
    """The FID of two sets of images: |m - m'|^2 + tr(C + C' - 2 (C C')^(1/2))."""
    root = torch.linalg.eigvals(one.covariance @ other.covariance).sqrt().real.sum()
    apart = (one.mean - other.mean).square().sum()
    return float(apart + one.covariance.trace() + other.covariance.trace() - 2 * root)
