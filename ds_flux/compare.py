"""A folder of weights held against another: names, shapes and dtypes from the files' headers, values a piece at a time."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ds_flux import UserError, progress
from ds_flux.merge import read_base, weight_files

Headers = dict[str, tuple[str, tuple[int, ...]]]


def headers(folder: Path) -> Headers:
    """{name: (dtype in safetensors' words, shape)} of all tensors in diffusers' layout; nothing of their values is read."""
    found: Headers = {}
    for path in weight_files(folder, "--verify"):
        try:
            with safe_open(path, "pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                found |= {name: (piece.get_dtype(), tuple(piece.get_shape())) for name, piece in slices.items()}
        except (OSError, SafetensorError) as error:
            raise UserError(f"--verify {path} cannot be read: {error}") from None
    return found


def check(written: Path, base: Path, expected: Headers) -> str:
    """One line that says what was found alike.

    Args:
        expected: the headers of the base.

    Raises:
        UserError: names, shapes or dtypes differ from the base's, or a value is not finite; of the first and the number.
    """
    found = headers(written)
    wrong = [f"{name} is missing" for name in expected.keys() - found.keys()]
    wrong += [f"{name} is not in the base" for name in found.keys() - expected.keys()]
    for name in found.keys() & expected.keys():
        for what, mine, theirs in zip(("dtype", "shape"), found[name], expected[name]):
            wrong += [f"{name} has {what} {mine}, the base's {theirs}"] if mine != theirs else []
    wrong = sorted(wrong) or not_finite(written)
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UserError(f"{written} is not like {base}: {wrong[0]}{more}")
    return f"{written} is like {base}: {len(found)} tensors of the same names, shapes and dtypes, every value finite"


def not_finite(folder: Path) -> list[str]:
    """What is to be said of tensors with a value that is infinite or no number."""
    tensors = read_base(folder, "--verify")[2]
    wrong = []
    total = sum(tensor.numel for tensor in tensors)
    with progress.bar(total=total, unit=" values", unit_scale=True, desc="verify") as bar:
        for tensor in tensors:
            bad = 0
            for chunk in (chunk for piece in tensor.pieces for chunk in piece.chunks()):
                bad += chunk.numel() - int(torch.isfinite(chunk).sum())
                bar.update(chunk.numel())
            wrong += [f"{tensor.name} has {bad} values that are not finite"] if bad else []
    return wrong
