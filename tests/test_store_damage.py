"""The store of encoded tensors: damage, newer records, removing, full disks, and what reading costs."""

import json
import os
import pickle
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ds_flux import UserError
from ds_flux.data import shards
from ds_flux.data.store import Store
from tests.test_store import NUM, assert_equal, check, files, fill, tensors_of, wanted


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 4
    path.write_bytes(data)


def index_of(path: Path) -> Path:
    return path.with_suffix(shards.INDEX)


def replace_in(path: Path, old: bytes, new: bytes) -> None:
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte of a tensor": (lambda data: flip(data, -100), "checksum of a record"),
    "a byte of the header": (lambda data: flip(data, 40), "checksum of its header"),
    "the header's length": (lambda data: flip(data, 0), "checksum of its header"),
    "cut short": (lambda data: os.truncate(data, 5000), "it has 5000 bytes"),
    "emptied": (lambda data: os.truncate(data, 0), "it has 0 bytes"),
    "no data": (Path.unlink, "its data are gone"),
    "no index": (lambda data: index_of(data).unlink(), "it has no index"),
    "torn index": (lambda data: os.truncate(index_of(data), 300), "its index cannot be read"),
    "empty index": (lambda data: os.truncate(index_of(data), 0), "its index cannot be read"),
    "an index of something else": (lambda data: index_of(data).write_text("[1]"), "its index cannot be read"),
    "a record under another key": (
        lambda data: replace_in(index_of(data), *(shards.hashed(key, shards.KEY) for key in ("image 5", "image 77"))),
        "checksum of a record",
    ),
    "a record of something else": (
        lambda data: replace_in(
            index_of(data), *(shards.hashed(fingerprint, shards.FINGERPRINT) for fingerprint in ("of now", "of then"))
        ),
        "checksum of a record",
    ),
    "other shapes": (lambda data: replace_in(index_of(data), b"[4, 8, 8]", b"[8, 8, 4]"), "checksum of a record"),
    "fewer layouts": (lambda data: replace_in(index_of(data), b"[[[", b"[  "), "its index cannot be read"),
}


def test_no_byte_is_wrong_and_nobody_knows(tmp_path: Path) -> None:
    """Each of an index, and some of the data: it is found, or it changes nothing."""
    store = Store(tmp_path)
    fill(store, range(2))
    (shard,) = store.shards
    index, data = shard.path(shards.INDEX), shard.path()
    cases = [(index, place) for place in range(index.stat().st_size)]
    cases += [(data, place) for place in range(0, data.stat().st_size, 19)]
    for path, place in cases:
        whole = path.read_bytes(), index.read_bytes()
        flip(path, place)
        opened = Store(tmp_path)
        if not opened.verify():
            assert path == index
            check(opened, range(2))
        index.write_bytes(whole[1])
        path.write_bytes(whole[0])


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_named_and_made_again(store: Store, damage: str) -> None:
    spoil, reason = DAMAGES[damage]
    name = store.shards[1].name
    spoil(store.shards[1].path())
    store = Store(store.folder)
    store.verify()
    assert list(store.ignored) == [name]
    assert reason in store.ignored[name]
    assert fill(store, range(NUM)) == list(wanted(range(4, 8)))
    check(store, range(NUM))
    check(Store(store.folder), range(NUM))
    store.sweep(idle_s=0)
    assert len(files(store.folder)) == 10
    assert not Store(store.folder).ignored


def test_damage_that_a_read_finds(store: Store) -> None:
    flip(store.shards[1].path(), -100)
    opened = Store(store.folder)
    with pytest.raises(UserError, match="checksum of a record is wrong; start again, and its 4 records are made again"):
        for number in range(NUM):
            opened.read(f"image {number}")
    assert Store(store.folder).missing(wanted(range(NUM))) == list(wanted(range(4, 8)))


def test_a_shard_that_shrinks_under_a_reader(store: Store) -> None:
    check(store, range(NUM))
    os.truncate(store.shards[0].path(), 5000)
    with pytest.raises(UserError, match="has 5000 bytes"):
        store.read("image 0")


def test_another_fingerprint_makes_just_those_again(store: Store) -> None:
    now = wanted(range(NUM)) | wanted(range(6, 9), "of a new image")
    assert store.missing(now) == ["image 6", "image 7", "image 8"]
    assert fill(store, range(6, 9), "of a new image") == ["image 6", "image 7", "image 8"]
    assert Store(store.folder).missing(now) == []


def test_the_newer_record_wins(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says, over runs, over the shards of a writer and within one."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    for version in range(3):
        with store.writer("a-rank-that-sorts-first", 1) as writer:
            for part in range(2):
                writer.add("image 3", "of now", {"version": torch.tensor([version, part])})
        assert Store(store.folder).read("image 3")["version"].tolist() == [version, 1]
    with store.writer("rank-0") as writer:
        writer.add("image 3", "of now", {"version": torch.tensor(8)})
        writer.add("image 3", "of now", {"version": torch.tensor(9)})
    store.refresh()
    assert store.read("image 3")["version"] == 9
    assert len(store.shards) == 5 + 6 + 1
    store.delete_superseded()
    assert len(files(store.folder)) == 2 * (5 + 1)
    assert Store(store.folder).read("image 3")["version"] == 9


def test_a_rolling_window(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for window in range(6):
        first = 10 * window
        assert len(fill(store, range(first, first + 20))) == (20 if window == 0 else 10)
        check(store, range(first, first + 20))
        store.delete(wanted(range(first, first + 10)))
        assert len(store) == 10
        assert len(files(tmp_path)) <= 2 * 6
        check(Store(tmp_path), range(first + 10, first + 20))
        assert len(Store(tmp_path)) == 10, "what was deleted stays so, in a shard that others keep as well"
    store.delete(wanted(range(60, 70)))
    assert files(tmp_path) == []


def test_a_reader_sees_what_others_do_when_it_looks_again(store: Store) -> None:
    reader = Store(store.folder)
    fill(store, range(NUM + 4))
    assert reader.missing(wanted(range(NUM + 4))) == list(wanted(range(NUM, NUM + 4)))
    reader.refresh()
    check(reader, range(NUM + 4))
    store.delete(wanted(range(4)))
    with pytest.raises(UserError, match="its data are gone"):
        Store.read(reader, "image 0")
    reader.refresh()
    assert reader.missing(wanted(range(NUM))) == list(wanted(range(4)))


def test_what_was_added_before_an_error_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with pytest.raises(UserError, match="an image"), store.writer("rank-0") as writer:
        writer.add("image 0", "of now", tensors_of(0))
        raise UserError("an image cannot be read")
    check(Store(tmp_path), range(1))


def test_a_full_disk(small_disk: Path) -> None:
    store = Store(small_disk / "store")
    record = {"latents": torch.randn(256, 1024)}
    with (
        pytest.raises(UserError, match=r"disk/store is full: 1.0 MiB are to be written, [\d.]+ KiB are free"),
        store.writer("rank-0", 1) as writer,
    ):
        for number in range(10):
            writer.add(f"image {number}", "of now", record)
    indexes, data = (files(store.folder, suffix) for suffix in (shards.INDEX, shards.DATA))
    assert len(indexes) == len(data) == len(files(store.folder)) // 2 == 3
    store.refresh()
    assert store.missing(wanted(range(10))) == list(wanted(range(3, 10)))
    assert not store.verify()
    with pytest.raises(UserError, match=r"store: 1\.5 GiB are needed there, and the disk has [\d.]+ KiB left"):
        store.room(3 << 29)
    store.room(1000)
    store.delete(["image 1"])
    with store.writer("rank-0", 1) as writer:
        writer.add("image 5", "of now", record)
    assert Store(store.folder).missing(wanted(range(10))) == [f"image {number}" for number in (1, 3, 4, 6, 7, 8, 9)]


def test_a_folder_that_cannot_be_written(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_number: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError, match="store cannot be written: Input/output error"):
        fill(store, range(NUM + 1))
    assert len(files(store.folder)) == 10


def private_kib() -> int:
    """Memory of this process that belongs to no file."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0])


def test_two_thousand_records_in_flat_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num, features = 2000, torch.arange(128 * 256).view(128, 256).bfloat16()
    store = Store(tmp_path)
    with store.writer("rank-0") as writer:
        for number in range(num):
            writer.add(str(number), "of now", {"latents": torch.full((16, 32, 32), float(number)), "text": features})
    store = Store(tmp_path)
    assert len(store.shards) == 4
    store.read("0")
    before, times = private_kib(), []
    for _visit in range(2):
        start = time.perf_counter()
        for number in range(num):
            assert store.read(str(number))["latents"][3, 3, 3] == number
        times.append((time.perf_counter() - start) / num * 1e6)
    assert private_kib() - before < 4 << 10
    with capsys.disabled():
        print(f"\n128 KiB records: {times[0]:.0f} us for a first read with its checksum, {times[1]:.0f} us for a second")


def test_many_records_are_held_in_few_bytes(tmp_path: Path) -> None:
    """Read or not, and in a copy for another process."""
    num, num_read = 20_000, 2000
    record = {"latents": torch.zeros(4), "text": torch.zeros(4).bfloat16()}
    with Store(tmp_path).writer("rank-0", 1000 * 24) as writer:
        for number in range(num):
            writer.add(str(number), f"of now {number}", record)
    tracemalloc.start()
    store = Store(tmp_path)
    held = [tracemalloc.get_traced_memory()[0]]
    for number in range(num_read):
        store.read(str(number))
    held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert (len(store), len(store.shards)) == (num, 20)
    assert held[0] / num < 50
    assert (held[1] - held[0]) / num_read < 20
    copy = pickle.dumps(store)
    assert len(copy) / num < 50
    assert_equal(pickle.loads(copy).read("77"), record)


def test_any_stock_reader_reads_an_index(store: Store) -> None:
    with safe_open(store.shards[0].path(shards.INDEX), "pt") as index:
        layouts, keys = json.loads(index.metadata()["layouts"]), index.get_tensor("key")
    assert layouts == [[["latents", "F32", [4, 8, 8]], ["text", "BF16", [16, 32]]]]
    assert [bytes(key.tolist()) for key in keys] == [shards.hashed(key, shards.KEY) for key in wanted(range(4))]


def test_a_size_is_readable() -> None:
    assert shards.readable(999) == "999 B"
    assert shards.readable(3 << 39) == "1.5 TiB"
