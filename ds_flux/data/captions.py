"""Captions as people have them - files of several lines, lists, tags - and the one that a visit gets."""

import re
from pathlib import Path
from typing import Any

import torch

from ds_flux.config import DataConfig
from ds_flux.data.decode import BadSample
from ds_flux.data.schedule import SampleKey
from ds_flux.randomness import sample_generator

Captions = str | list[str] | None  # as stored: one, several, none


def read_caption_file(path: Path) -> list[str]:
    """Each line that is not empty is a caption; UTF-8, with or without a byte order mark.

    Raises:
        BadSample: the file is empty, not UTF-8, or cannot be read.
    """
    try:
        text = decoded(path.read_bytes(), path.name)
    except OSError as error:
        raise BadSample(f"{path.name}: {error.strerror}") from None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        raise BadSample(f"{path.name} is empty")
    return lines


def decoded(raw: bytes, what: str) -> str:
    """The text of bytes in UTF-8, with or without a byte order mark.  Raises BadSample."""
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise BadSample(f"{what} is not UTF-8") from None


def caption_of(captions: Captions, config: DataConfig, seed: int, key: SampleKey) -> str:
    """The caption of one visit: one of those stored, its tags in an order of their own, trigger word and prefix in front.

    Raises:
        BadSample: there is none, or it is not text.
    """
    texts = texts_of(captions)
    text = texts[drawn(len(texts), seed, key)]
    if config.shuffle_tags:
        text = with_tags_shuffled(text, config.keep_tags, seed, key)
    return with_words_in_front(text, config)


def texts_of(captions: Any) -> list[str]:
    """All captions of a sample that say something; at least one.

    Raises:
        BadSample: there is none, or one is not text.
    """
    cells = captions if isinstance(captions, list) else [captions]
    for cell in cells:
        if cell is not None and not isinstance(cell, str):
            raise BadSample(f"the caption is a {type(cell).__name__}, expected text")
    texts = [cell.strip() for cell in cells if cell is not None and cell.strip()]
    if not texts:
        raise BadSample("there is no caption" if captions is None else "the caption is empty")
    return texts


def drawn(num_captions: int, seed: int, key: SampleKey) -> int:
    """Which of its captions a visit gets; the same on any rank, and for whoever plans the batches."""
    return int(torch.randint(num_captions, (), generator=sample_generator(seed, *key, "caption")))


def with_tags_shuffled(text: str, num_kept: int, seed: int, key: SampleKey) -> str:
    """Comma-separated tags in another order for each visit; the first `num_kept` stay."""
    tags = [tag.strip() for tag in text.split(",") if tag.strip()]
    kept, others = tags[:num_kept], tags[num_kept:]
    order = torch.randperm(len(others), generator=sample_generator(seed, *key, "tags")).tolist()
    return ", ".join([*kept, *(others[place] for place in order)])


def with_words_in_front(text: str, config: DataConfig) -> str:
    """The prefix, the trigger word unless the caption has it (as a whole word, in any case), the caption."""
    word = config.trigger_word
    if word and not re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE):
        text = f"{word}, {text}"
    return f"{config.caption_prefix.rstrip()} {text}" if config.caption_prefix else text
