"""Data that are read from front to back: one order for any number of processes, positions, and shards that cannot be read."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from ds_flux import UserError
from ds_flux.config import DataConfig
from ds_flux.data.decode import BadSample
from ds_flux.data.schedule import SampleKey
from ds_flux.data.stream import Position, Stream, StreamedRow, StreamSchedule, open_stream
from tests.conftest import Assets, Done
from tests.distributed import ROOT, metrics, run_jobs
from tests.tars import Files, jpg, rows, write_shards, write_tar
from tests.test_errors import one_line

NUM_SHARDS, NUM_ROWS, BATCH = 4, 6, 8
JPG_AND_TXT = dict(image_column="jpg", caption_column="txt", streaming=True)
Steps = list[list[StreamedRow]]

pytestmark = pytest.mark.timeout(600)  # several launches of two ranks


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four archives of six rows."""
    return write_shards(tmp_path_factory.mktemp("shards"), NUM_SHARDS, NUM_ROWS)


def stream_of(files: Any, buffer: int = 12, weights: tuple[float, ...] = (), **flags: Any) -> Stream:
    given = {"data_files": files} if files else {}
    return open_stream(DataConfig(**{**given, **JPG_AND_TXT, **flags}, shuffle_buffer=buffer), 3, weights)


def schedule(stream: Stream, num_ranks: int, rank: int, accumulation: int = 1, batch: int = BATCH) -> StreamSchedule:
    micro_batch_size = batch // num_ranks // accumulation
    plan = dict(micro_batch_size=micro_batch_size, gradient_accumulation_steps=accumulation, dp_size=num_ranks, dp_rank=rank)
    return StreamSchedule(**plan, seed=3, stream=stream)


def read(stream: Stream, num_steps: int, num_ranks: int = 1, record: Any = None, **split: int) -> tuple[Steps, Any]:
    """The rows of each step over all ranks, and what a checkpoint behind them says, as its file has it."""
    steps: Steps = [[] for _ in range(num_steps)]
    for rank in range(num_ranks):
        plan = schedule(stream, num_ranks, rank, **split).behind(record)
        for number, batch in enumerate(plan.micro_batches(0, num_steps)):
            steps[number // plan.gradient_accumulation_steps] += batch
    positions = [(row.lane, row.position) for step in steps for row in step if row.position]
    return steps, json.loads(json.dumps(schedule(stream, 1, 0).behind(record).record(positions)))


def keys(steps: Steps) -> list[Counter[SampleKey]]:
    return [Counter(row.key for row in step) for step in steps]


@pytest.mark.parametrize(("num_ranks", "accumulation"), [(1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_any_split_sees_the_same_global_batches(shards: str, num_ranks: int, accumulation: int) -> None:
    expected, _ = read(stream_of(shards), 9)
    found, _ = read(stream_of(shards), 9, num_ranks, accumulation=accumulation)
    assert keys(found) == keys(expected)
    assert {row.title: row.cells for step in found for row in step} == {row.title: row.cells for s in expected for row in s}


def test_each_row_comes_once_an_epoch_in_an_order_of_its_own(shards: str) -> None:
    steps, _ = read(stream_of(shards), 6)  # 48 samples of 24: two epochs
    seen = [row for step in steps for row in step]
    assert len({row.key for row in seen}) == 48
    titles = [[row.title for row in seen if row.key[1] == epoch] for epoch in (0, 1)]
    assert sorted(titles[0]) == sorted(titles[1]) and len(set(titles[0])) == 24
    assert titles[0] != titles[1] and titles[0] != sorted(titles[0])
    assert [row.title for step in read(stream_of(shards), 6)[0] for row in step] == titles[0] + titles[1]


def test_ranks_read_shards_of_their_own(shards: str) -> None:
    stream = stream_of(shards)
    assert stream.num_lanes == NUM_SHARDS
    read_by = [{row.title[:13] for batch in schedule(stream, 2, rank).micro_batches(0, 3) for row in batch} for rank in (0, 1)]
    assert len(read_by[0]) == len(read_by[1]) == 2 and not read_by[0] & read_by[1]


@pytest.mark.parametrize(("before", "behind"), [(1, 1), (2, 2), (4, 1), (1, 4), (2, 8)])
def test_a_run_goes_on_with_the_next_sample_on_any_number_of_ranks(shards: str, before: int, behind: int) -> None:
    whole, _ = read(stream_of(shards), 9)
    first, record = read(stream_of(shards), 4, before)
    second, record = read(stream_of(shards), 2, behind, record)
    third, _ = read(stream_of(shards), 6, behind, record, batch=BATCH // 2 if behind < 8 else BATCH)
    assert keys(first + second) == keys(whole[:6])
    flat = [row.key for step in third for row in step]
    assert Counter(flat[:24]) == Counter(row.key for step in whole[6:] for row in step)


def test_another_buffer_loses_and_repeats_no_more_than_it_holds(shards: str) -> None:
    buffer = 12
    first, record = read(stream_of(shards, buffer), 2)
    second, _ = read(stream_of(shards, 4), 1, record=record)
    seen = Counter(row.title for step in first + second for row in step)
    assert sum(seen.values()) == 24 and 24 - len(seen) <= buffer


def test_other_shards_begin_a_new_epoch(shards: str, tmp_path: Path) -> None:
    _, record = read(stream_of(shards), 2)
    more = write_shards(tmp_path, 8, NUM_ROWS)
    behind, after = read(stream_of(more), 6, record=record)
    assert {row.key[1] for step in behind for row in step} == {1}
    assert len({row.key for step in behind for row in step}) == 48
    assert sum(num_given for num_given, _ in after["lanes"].values()) == 8 * BATCH


def with_bad_rows() -> Files:
    """Six rows, of which four cannot be used."""
    files = dict(rows(0, 6))
    files["000001.jpg"] = b"no picture"
    del files["000002.txt"]
    files["000003.txt"] = b"\xff\xfe\xfa"
    files["000004.jpg"] = jpg((9, 9, 9))[:300]
    return list(files.items())


REASONS = {
    "000001": "no image", "000002": "there is no caption", "000003": "the caption is not UTF-8", "000004": "",
    "behind 000003": "the rest of the archive cannot be read",
}  # fmt: skip


@pytest.mark.parametrize("streaming", ["true", "false"])
def test_what_is_wrong_in_an_archive_is_named(tmp_path: Path, run_main: Callable[..., Done], streaming: str) -> None:
    """Also its end, which is missing: that is a row too."""
    write_tar(tmp_path / "a.tar", with_bad_rows())
    whole = write_tar(tmp_path / "whole", rows(0, 6)).read_bytes()
    (tmp_path / "b.tar").write_bytes(whole[: whole.index(b"000004.jpg")])
    flags = ["--data_files", tmp_path / "*.tar", "--image_column", "jpg", "--caption_column", "txt", "--streaming", streaming]
    done = run_main("doctor", "--data", *flags)
    assert done.status == 2
    assert "11 samples, 0 references, 5 that cannot be used" in done.output
    for key, reason in REASONS.items():
        line = next(line for line in done.output.splitlines() if f".tar: {key} cannot be used: " in line)
        assert reason in line


def test_a_shard_that_another_reader_gives_up_on_is_one_row(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"image": ["a.png"] * 4, "text": ["a"] * 4}).to_parquet(tmp_path / "0.parquet")
    good = (tmp_path / "0.parquet").read_bytes()
    (tmp_path / "1.parquet").write_bytes(good)
    stream = stream_of(str(tmp_path / "*.parquet"), image_column="image", caption_column="text")
    (tmp_path / "1.parquet").write_bytes(b"PAR1" + b"\0" * (len(good) - 8) + b"PAR1")
    found = list(stream.once())
    assert [row.title for row in found][3:] == [f"row {n} of shard {s} of {tmp_path}/*.parquet" for n, s in [(3, 0), (0, 1)]]
    with pytest.raises(BadSample, match="the rest of the shard cannot be read"):
        found[-1].images(0)


def test_nothing_to_read_ends(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"image": ["a.png"], "text": ["a"]}).select([]).to_parquet(tmp_path / "0.parquet")
    stream = stream_of(str(tmp_path / "0.parquet"), image_column="image", caption_column="text")
    with pytest.raises(UserError, match="nothing to read"):
        next(schedule(stream, 1, 0).micro_batches(0, 1))


def test_data_sets_are_mixed_by_weight(tmp_path: Path) -> None:
    """In any stretch; each has epochs of its own."""
    for name, num in (("many", 40), ("few", 4)):
        table = datasets.Dataset.from_dict({"image": [f"{name}.png"] * num, "text": [name] * num})
        table.save_to_disk(tmp_path / name)
    flags = dict(dataset_name=[str(tmp_path / "many"), str(tmp_path / "few")], image_column="image", caption_column="text")
    stream = stream_of(None, weights=(3.0, 1.0), **flags)
    steps, record = read(stream, 12)
    for num in (4, 8, 12):
        texts = Counter(row.cells["text"] for step in steps[:num] for row in step)
        assert abs(texts["few"] - num * BATCH / 4) <= 1
    assert max(Counter(row.key for step in steps for row in step).values()) == 1
    visits = {row.key[1] for step in steps for row in step if row.cells["text"] == "few"}
    assert set(range(6)) <= visits <= set(range(7)), "a quarter of 96, of 4 rows"
    assert keys(read(stream, 3, 2)[0] + read(stream, 9, 2, read(stream, 3)[1])[0]) == keys(steps)
    assert all(len(Position(*lane).places) == 2 for lane in record["lanes"].values())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max_train_steps", 0], "--max_train_steps 0 must be 1 or more"),
        (["--repeats", 2, "--max_train_steps", 3], "--repeats has no effect with --streaming"),
        (["--cache_text", "--max_train_steps", 3], "--cache_text and --streaming contradict"),
        (["--num_train_epochs", 2], "--streaming needs --max_train_steps"),
        (
            ["--use_aspect_ratio_buckets", "--max_train_steps", 3, "--train_batch_size", 2],
            "--streaming: --use_aspect_ratio_buckets or several --resolution make samples of different shapes",
        ),
        (["--max_train_steps", 3, "--dataset_weights", "[1, 2]"], "--dataset_weights has 2 numbers for 1 data sets"),
        (["--max_train_steps", 3, "--dataset_weights", "[0]"], "--dataset_weights [0.0]: each must be more than 0"),
        (["--max_train_steps", 3, "--caption_column", "text"], "the nearest known one is txt"),
    ],
)
def test_bad_flags(
    assets: Assets, shards: str, tmp_path: Path, run_main: Callable[..., Done], flags: list[Any], message: str
) -> None:
    own = dict(dataset_name=None, data_files=shards, image_column="jpg", caption_column="txt", streaming="true")
    own |= dict(max_train_steps=None, train_batch_size=None)
    one_line(run_main("train", *assets.flags(tmp_path / "run", **own), *flags), message)


# ---------------------------------------------------------------------------------------------------------------------
# the recipes for pre-training, small


def twin(recipe: str, assets: Assets, shards: str, output_dir: Path, **changes: object) -> list[str]:
    """A recipe with a small model and small images; all else is its own."""
    flags = {
        "config": ROOT / f"launch/recipes/flux1_schnell_pretrain_{recipe}.yaml",
        "pretrained_model_name_or_path": assets.model,
        "transformer_config": assets.model / "transformer/config.json",
        "data_files": shards,
        "output_dir": output_dir,
        "resolution": 32,
        "max_sequence_length": 8,
        "mixed_precision": "no",
        "learning_rate": 1e-2,
        "lr_warmup_steps": 2,
        "dataloader_num_workers": 0,
        "max_train_steps": 6,
        "train_batch_size": BATCH,
        "deepspeed_config": assets.ds_config(3),
        "text_encoder_deepspeed_config": assets.ds_config(3),
        **changes,
    }
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def runs(assets: Assets, shards: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both recipes on one process, and on two with worker processes; one of those stopped and resumed."""
    folder = tmp_path_factory.mktemp("runs")
    mlperf = {"cache_dir": folder / "cache"}
    whole = [
        twin("cc12m", assets, shards, folder / "cc12m 1"),
        twin("mlperf", assets, shards, folder / "mlperf 1", **mlperf),
    ]
    run_jobs(1, whole, folder)
    two = {"train_batch_size": BATCH // 2, "dataloader_num_workers": 2}
    stopped = {**two, "checkpointing_steps": 3}
    run_jobs(
        2,
        [
            twin("cc12m", assets, shards, folder / "cc12m 2", **{**stopped, "max_train_steps": 3}),
            twin("cc12m", assets, shards, folder / "cc12m 2", **stopped, resume_from_checkpoint="latest"),
            twin("mlperf", assets, shards, folder / "mlperf 2", **two, **mlperf),
        ],
        folder,
    )
    return folder


@pytest.mark.parametrize("recipe", ["cc12m", "mlperf"])
def test_recipes_on_archives(runs: Path, recipe: str) -> None:
    """The same on two processes with worker processes, resumed in the middle, as on one without."""
    one, two = (metrics(runs / f"{recipe} {num}") for num in (1, 2))
    assert len(one) == len(two) == 6
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in two] == pytest.approx([row[key] for row in one], rel=2e-5), key
    assert one[-1]["loss"] < one[0]["loss"]
