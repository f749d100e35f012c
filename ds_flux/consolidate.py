"""ZeRO checkpoint -> safetensors that diffusers and others load; one process, streaming, any stage and number of ranks.

The ranks' files are memory-mapped and written out in pieces, so memory does not grow with the model.  A LoRA may be merged
into its base on the way.  Nothing heavier than torch is imported.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jsonargparse import ArgumentParser

from ds_flux import UserError, compare, export, foreign, lora, merge
from ds_flux.export import Format, Lora
from ds_flux.flags import parse
from ds_flux.manifest import MANIFEST, find, read_manifest
from ds_flux.streaming import TensorPieces, write_files, write_shards
from ds_flux.zero import foreign as foreign_files
from ds_flux.zero.files import read_checkpoint, read_ema

ORIGINAL_FILE = "transformer.safetensors"  # not the name that from_pretrained looks for: these are not its keys
Weights = Literal["trained", "ema"]


@dataclass(frozen=True, kw_only=True)
class ConsolidateConfig:
    """consolidation"""

    format: Format = "diffusers"
    """names of the tensors: diffusers'; bfl, the original repositories', in one file; comfyui, the same for all weights and
    lora_unet_* for a LoRA"""
    merge_lora: str | None = None
    """CHECKPOINT is a LoRA's: write all weights, those of this base with the LoRA added.  Folder of a transformer in
    diffusers' layout or of a model; its names and shapes are checked, its values are not"""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """of the tensors written"""
    weights: Weights = "trained"
    """those that were trained, or their moving average that --ema_decay kept"""
    max_shard_size: str = "10GB"
    """largest weight file, e.g. 5GB or 500MB, where --format has more than one"""
    config: str | None = None
    """CHECKPOINT is of plain DeepSpeed, or of accelerate with it: which transformer it is of, as the folder of one in
    diffusers' layout, of a model, or a config.json"""
    verify: str | None = None
    """folder of a transformer or model; what was written must have its names, shapes and dtypes, and finite values"""


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What there is to write: all weights, or a LoRA."""

    transformer_class: str | None
    """None: a LoRA's file does not say"""
    transformer_config: dict[str, Any]
    weights: list[TensorPieces]
    """by diffusers' names; none of a LoRA"""
    adapters: Lora | None = None


def main(argv: list[str]) -> int:
    """`ds-flux consolidate CHECKPOINT OUT`."""
    parser = ArgumentParser(prog="ds-flux consolidate", exit_on_error=False)
    parser.add_argument("checkpoint", type=str, help="a checkpoint, or a run: then its latest one; or a LoRA file to merge")
    parser.add_argument("out", type=str, help="folder to write; it must not exist")
    parser.add_class_arguments(ConsolidateConfig)
    settings = parse(parser, argv)
    if settings.config is not None and settings.weights == "ema":
        raise UserError("--weights ema: only checkpoints of ds_flux hold an average; leave out --config")
    config, verify = (None if path is None else Path(path) for path in (settings.config, settings.verify))
    folder = find_checkpoint(Path(settings.checkpoint), config)
    expected = {} if verify is None else expected_of(verify, folder, settings)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[settings.dtype]
    base = None if settings.merge_lora is None else Path(settings.merge_lora)
    max_shard_bytes = parse_size(settings.max_shard_size)
    chosen = {"form": settings.format, "base": base, "config": config, "weights": settings.weights}
    written = consolidate(folder, Path(settings.out), dtype, max_shard_bytes, **chosen)
    print(f"{folder} -> {', '.join(map(str, written[:3]))}{' ...' if len(written) > 3 else ''}")
    if verify is not None:
        print(compare.check(Path(settings.out), verify, expected))
    return 0


def find_checkpoint(path: Path, config: Path | None = None) -> Path:
    """The checkpoint itself, or the latest one of a run's folder; or a LoRA file that was written from one.

    Args:
        config: says that the checkpoint is of plain DeepSpeed or accelerate.
    """
    if is_lora_file(path):
        return path
    if not path.is_dir():
        raise UserError(f"{path}: no such folder")
    found = path if (path / MANIFEST).exists() else find(path)
    others = foreign_files.find(path) if found is None else None
    if found is not None and config is not None:
        raise UserError(f"--config has no effect: {found} says in its {MANIFEST} which transformer it is of")
    if others is not None and config is None:
        raise UserError(f"{others} has no {MANIFEST}: if DeepSpeed or accelerate wrote it, say --config TRANSFORMER")
    if found is None and others is None:
        raise UserError(f"{path} is no checkpoint and has none in it: there is no {MANIFEST}, nor files of DeepSpeed's")
    return found or others


def expected_of(base: Path, folder: Path, settings: Any) -> compare.Headers:
    """What --verify is to find.  Raises UserError where there is no base, or nothing that could be like it."""
    if settings.format != "diffusers":
        raise UserError(f"--verify compares with diffusers' layout, which --format {settings.format} does not write")
    is_ours = settings.config is None and not is_lora_file(folder)
    if is_ours and settings.merge_lora is None and read_manifest(folder).lora is not None:
        raise UserError("--verify compares all weights: the checkpoint is of a LoRA, give --merge_lora BASE as well")
    return compare.headers(base)


def is_lora_file(path: Path) -> bool:
    """Whether a path is meant as that of a LoRA's file, or is the folder of one."""
    return path.suffix == ".safetensors" or (path / lora.FILE_NAME).is_file()


def parse_size(text: str) -> int:
    """ "5GB" -> bytes (powers of ten, as in transformers and diffusers)."""
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
    number, unit = text[:-2], text[-2:].upper()
    try:
        size = int(float(number) * units[unit])
    except (KeyError, ValueError):
        raise UserError(f"--max_shard_size {text}: expected a number and KB, MB or GB, e.g. 5GB") from None
    if size <= 0:
        raise UserError(f"--max_shard_size {text} must be more than nothing")
    return size


def consolidate(
    folder: Path,
    out: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
    *,
    form: Format = "diffusers",
    base: Path | None = None,
    config: Path | None = None,
    weights: Weights = "trained",
) -> list[Path]:
    """Write the weights of a checkpoint to folder `out`, complete or not at all.

    All weights: config.json and `diffusion_pytorch_model*.safetensors` with their index, or one file of original names.
    A LoRA: one file.

    Args:
        base: the base that a LoRA is to be merged into.
        config: of the transformer, where the checkpoint has no manifest.
        weights: those that were trained, or their average where they were trained with --ema_decay.

    Raises:
        UserError: the checkpoint is not whole or has no averages, a LoRA does not fit its base, the format has no such file,
            or `out` exists.
    """
    if out.exists():
        raise UserError(f"{out} exists already: remove it, or choose another name")
    contents = read(folder, weights) if config is None else read_foreign(folder, config)
    if base is not None:
        contents = merge_into(base, contents)
    tensors = named(contents, form)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    if contents.adapters is not None:
        write_files(partial, {lora.FILE_NAME: tensors}, dtype)
    elif form == "diffusers":
        write_shards(partial, merge.WEIGHTS_NAME, tensors, dtype, max_shard_bytes)
    else:
        write_files(partial, {ORIGINAL_FILE: tensors}, dtype)
    if contents.adapters is None:
        config = {"_class_name": contents.transformer_class, **contents.transformer_config}
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    partial.rename(out)
    return sorted(out.iterdir())


def read(path: Path, weights: Weights) -> Contents:
    """What a checkpoint, or a LoRA's file, holds."""
    if is_lora_file(path):
        if weights == "ema":
            raise UserError("--weights ema goes with a checkpoint: a LoRA's file has one kind of weights")
        file = path / lora.FILE_NAME if path.is_dir() else path
        return Contents(transformer_class=None, transformer_config={}, weights=[], adapters=export.read_lora_file(file))
    manifest = read_manifest(path)
    tensors = read_checkpoint(path, manifest)
    if weights == "ema":
        averages = {tensor.name: tensor for tensor in read_ema(path, manifest)}
        tensors = [averages.get(tensor.name, tensor) for tensor in tensors]
    return Contents(
        transformer_class=manifest.transformer_class,
        transformer_config=manifest.transformer_config,
        weights=tensors if manifest.lora is None else [],
        adapters=None if manifest.lora is None else export.lora_of(tensors, float(manifest.lora["alpha"])),
    )


def read_foreign(folder: Path, config: Path) -> Contents:
    """What a checkpoint of plain DeepSpeed, or of accelerate with it, holds of a transformer; says what else it does."""
    transformer_class, transformer_config = foreign.read_config(config)
    tensors, others = foreign.transformers_own(foreign_files.read(folder), folder)
    if others:
        print(f"{folder}: {len(others)} tensors are not the transformer's and left out: {', '.join(others[:3])}")
    return Contents(transformer_class=transformer_class, transformer_config=transformer_config, weights=tensors)


def merge_into(base: Path, contents: Contents) -> Contents:
    """All weights: those of the base with the LoRA added.  Raises UserError where one does not fit the other."""
    if contents.adapters is None:
        raise UserError("--merge_lora: the checkpoint is of all weights, there is no LoRA to merge")
    base_class, base_config, weights = merge.read_base(base)
    if contents.transformer_class not in (None, base_class):
        raise UserError(f"--merge_lora {base} is a {base_class}, the LoRA is of a {contents.transformer_class}")
    return Contents(
        transformer_class=base_class,
        transformer_config=contents.transformer_config or base_config,
        weights=merge.merged(weights, contents.adapters.layers, contents.adapters.scale),
    )


def named(contents: Contents, form: Format) -> list[TensorPieces]:
    """The tensors by the names of a format."""
    if contents.transformer_class is None:
        raise UserError("a LoRA's file is written already: it can only be merged, with --merge_lora BASE")
    if contents.adapters is None:
        return export.weights(contents.weights, contents.transformer_class, form)
    return export.lora_weights(contents.adapters, contents.transformer_class, form)
