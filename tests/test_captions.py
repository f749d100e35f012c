"""Captions as people have them, and the one that a visit gets."""

from pathlib import Path
from typing import Any

import pytest

from ds_flux import UserError, checks
from ds_flux.config import SECTIONS, Config, DataConfig, ModelConfig
from ds_flux.data.buckets import Buckets
from ds_flux.data.captions import caption_of, drawn, read_caption_file
from ds_flux.data.decode import BadSample
from ds_flux.data.images import Batches, RawBatch
from ds_flux.data.shapes import Shapes, caption_lengths
from ds_flux.data.sources import open_source
from tests.pairs import dataset_of
from tests.test_decode import BLUE, RED, folder_of, halves

# ---------------------------------------------------------------------------------------------------------------------
# captions

KEYS = [(sample, visit) for sample in range(20) for visit in range(3)]


@pytest.mark.parametrize(
    "data, expected",
    [
        (b"a cat", ["a cat"]),
        (b"\xef\xbb\xbfa cat\r\n", ["a cat"]),
        ("one\n\n  two \nthrée\n".encode(), ["one", "two", "thrée"]),
        ("café".encode("latin-1"), "is not UTF-8"),
        ("a cat".encode("utf-16"), "is not UTF-8"),
        (b"", "is empty"),
        (b"\xef\xbb\xbf \n\n", "is empty"),
        (None, "No such file"),
    ],
)
def test_caption_files(tmp_path: Path, data: bytes | None, expected: list[str] | str) -> None:
    path = tmp_path / "cat.txt"
    if data is not None:
        path.write_bytes(data)
    if isinstance(expected, list):
        assert read_caption_file(path) == expected
        return
    with pytest.raises(BadSample, match=f"cat.txt.* {expected}|cat.txt: {expected}"):
        read_caption_file(path)


@pytest.mark.parametrize(
    "captions, reason",
    [
        (None, "there is no caption"),
        ("", "the caption is empty"),
        (" \n", "the caption is empty"),
        ([], "the caption is empty"),
        ([None, " "], "the caption is empty"),
        (3, "the caption is a int, expected text"),
        (["a", 3], "the caption is a int, expected text"),
        ({"en": "a"}, "the caption is a dict, expected text"),
    ],
)
def test_no_caption(captions: Any, reason: str) -> None:
    with pytest.raises(BadSample, match=reason):
        caption_of(captions, DataConfig(), 0, (0, 0))


def test_one_of_several_captions_is_drawn_for_each_visit() -> None:
    texts = ["a", None, "b", " c "]
    found = [caption_of(texts, DataConfig(), 0, key) for key in KEYS]
    assert found == [caption_of(texts, DataConfig(), 0, key) for key in KEYS]
    assert found != [caption_of(texts, DataConfig(), 1, key) for key in KEYS]
    assert {text: found.count(text) > 8 for text in found} == {"a": True, "b": True, "c": True}
    assert caption_of(["a"], DataConfig(), 0, (0, 0)) == caption_of("a", DataConfig(), 0, (0, 0)) == "a"


@pytest.mark.parametrize(
    "flags, text, expected",
    [
        ({"caption_prefix": "a photo of"}, "a cat", "a photo of a cat"),
        ({"caption_prefix": "a photo of "}, "a cat", "a photo of a cat"),
        ({"trigger_word": "sks"}, "a cat", "sks, a cat"),
        ({"trigger_word": "sks"}, "a cat, SKS", "a cat, SKS"),
        ({"trigger_word": "sks"}, "a cat with skset", "sks, a cat with skset"),
        ({"trigger_word": "<sks> dog"}, "my <sks> dog", "my <sks> dog"),
        ({"trigger_word": "sks", "caption_prefix": "art:"}, "a cat", "art: sks, a cat"),
    ],
)
def test_words_in_front(flags: dict[str, Any], text: str, expected: str) -> None:
    assert caption_of(text, DataConfig(**flags), 0, (0, 0)) == expected


def test_tags_are_shuffled_and_the_first_stay() -> None:
    config = DataConfig(shuffle_tags=True, keep_tags=2, trigger_word="sks")
    text = "1girl, solo,red hair, smile , smile, sky,"
    found = [caption_of(text, config, 0, key) for key in KEYS]
    assert found == [caption_of(text, config, 0, key) for key in KEYS]
    assert len(set(found)) > 8
    for caption in found:
        assert caption.startswith("sks, 1girl, solo, ")
        assert sorted(caption.split(", ")) == sorted(["sks", "1girl", "solo", "red hair", "smile", "smile", "sky"])
    assert caption_of("a cat", config, 0, (0, 0)) == "sks, a cat", "fewer tags than stay"


def test_folders_with_either_ending_in_any_case(tmp_path: Path) -> None:
    folder_of(tmp_path, 5, __txt="text", __caption="caption")
    (tmp_path / "1.caption").write_text("one\ntwo\n")
    (tmp_path / "2.TXT").write_text("loud")
    (tmp_path / "3.Caption").write_text("odd")
    (tmp_path / "4.v2.txt").write_text("of another image")
    (tmp_path / "5.pdf").write_text("PIL writes these and does not read them")
    source = open_source(DataConfig(instance_data_dir=str(tmp_path), instance_prompt="plain"))
    assert [source.caption(index) for index in range(len(source))] == ["text", ["one", "two"], "loud", "odd", "plain"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_several_captions_of_a_table_reach_the_prompts(tmp_path: Path, num_workers: int) -> None:
    import datasets

    rows = {"image": [halves("RGB", RED, BLUE)] * 2, "text": [["a", "b", "c"], ["d", ""]]}
    kinds = datasets.Features({"image": datasets.Image(), "text": datasets.List(datasets.Value("string"))})
    datasets.Dataset.from_dict(rows, features=kinds).save_to_disk(tmp_path / "rows")
    config = DataConfig(
        dataset_name=str(tmp_path / "rows"), caption_column="text", resolution=16, dataloader_num_workers=num_workers
    )
    samples = dataset_of(config, 0)
    keys = [(0, visit) for visit in range(12)] + [(1, 0)]
    prompts = []
    for batch in Batches(samples, [[key] for key in keys]):
        assert isinstance(batch, RawBatch)
        assert batch.prompts["text_encoder"] == batch.prompts["text_encoder_2"]
        prompts += batch.prompts["text_encoder"]
    assert prompts == [["a", "b", "c"][drawn(3, 0, key)] for key in keys[:-1]] + ["d"]
    assert set(prompts) == {"a", "b", "c", "d"}


def test_the_window_is_that_of_the_caption_drawn(tmp_path: Path) -> None:
    folder_of(tmp_path, 2)
    (tmp_path / "0.txt").write_text("a\n" + "a " * 30)
    (tmp_path / "1.txt").write_bytes(b"\xff")
    config = DataConfig(instance_data_dir=str(tmp_path), caption_prefix="p")
    source = open_source(config)
    lengths = caption_lengths(source, config, lambda texts: [len(text.split()) for text in texts], every=True)
    assert lengths == [(2, 31), (0,)], "prefix included; an unreadable one counts as empty"
    shapes = Shapes(Buckets({32: ((32, 32),)}), [], [], lengths, 0)
    for visit in range(10):
        caption = caption_of(source.caption(0), config, 5, (0, visit))
        assert shapes.of((0, visit), config, 5, "text_encoder") == ((32, 32), (), len(caption.split()))


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"alpha_background": "blak"}, "--alpha_background blak: expected the name of a colour"),
        ({"max_image_pixels": 0}, "--max_image_pixels 0 must be 1 or more"),
        ({"keep_tags": 2}, "--keep_tags has no effect without --shuffle_tags"),
        ({"keep_tags": -1, "shuffle_tags": True}, "--keep_tags -1 must be 0 or more"),
        ({"instance_prompt": " "}, "--instance_prompt is empty"),
    ],
)
def test_flags_that_cannot_be(flags: dict[str, Any], message: str) -> None:
    data = DataConfig(**{"instance_data_dir": ".", "instance_prompt": "p", **flags})
    with pytest.raises(UserError, match=message):
        sections = {name: section() for name, section in SECTIONS.items()}
        checks.check(Config(**sections | {"model": ModelConfig(pretrained_model_name_or_path="m"), "data": data}))
