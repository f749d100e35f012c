"""The store of encoded tensors: what is written comes back, whatever happens to the writers and to the disk."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from ds_flux.data.shards import KEY, hashed
from ds_flux.data.store import Store

SMALL = 8 << 10  # four records of a shard
NUM = 20
WRITER = """
import sys
from pathlib import Path
from ds_flux.data.store import Store
from tests.test_store import fill
folder, first, last, num_rounds = Path(sys.argv[1]), *map(int, sys.argv[2:])
print("begun", flush=True)
for number in range(num_rounds):
    fill(Store(folder), range(first, last), f"round {number}" if num_rounds > 1 else "of now")
"""


def tensors_of(number: int) -> dict[str, Tensor]:
    """2 KiB that no other record has."""
    generator = torch.Generator().manual_seed(number)
    latents = torch.randn(4, 8, 8, generator=generator)
    return {"latents": latents, "text": torch.randn(16, 32, generator=generator).bfloat16()}


def wanted(numbers: range, fingerprint: str = "of now") -> dict[str, str]:
    return {f"image {number}": fingerprint for number in numbers}


def fill(store: Store, numbers: range, fingerprint: str = "of now") -> list[str]:
    """Write what is missing, and see it; returns what that was."""
    missing = store.missing(wanted(numbers, fingerprint))
    with store.writer("rank-0", SMALL) as writer:
        for key in missing:
            writer.add(key, fingerprint, tensors_of(int(key.split()[1])))
    store.refresh()
    return missing


def check(store: Store, numbers: range, fingerprint: str = "of now") -> None:
    assert store.missing(wanted(numbers, fingerprint)) == []
    for number in numbers:
        assert_equal(store.read(f"image {number}"), tensors_of(number))


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(mine) == list(theirs)
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype
        assert mine[name].shape == tensor.shape
        assert torch.equal(mine[name], tensor)


def spawn(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WRITER, *map(str, arguments)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE)


def files(folder: Path, suffix: str = "") -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(suffix))


def test_every_kind_of_tensor_comes_back_as_it_was(tmp_path: Path) -> None:
    batch = torch.randn(2, 3, 6, requires_grad=True)
    record = {
        "odd": torch.tensor([True, False, True]),
        "bf16": torch.randn(3, 5).bfloat16(),
        "a row": batch[0],
        "across": batch[1].t(),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "ids": torch.arange(7),
        "fp8": torch.randn(9).to(torch.float8_e4m3fn).view(torch.uint8),
    }
    keys = ["", "a/b ../c\n", "Bär", "\udcff.png", "x" * 5000]
    store = Store(tmp_path / "new" / "store")
    with store.writer("rank-0") as writer:
        for key in keys:
            writer.add(key, "", record)
        record["odd"].fill_(False)  # what comes after `add` changes nothing
    record["odd"][::2] = True
    store.refresh()
    assert len(store) == len(keys) and "x" not in store
    for key in keys:
        assert key in store
        assert_equal(store.read(key), record)
    (data,) = store.folder.glob("*.safetensors")
    with safe_open(data, "pt") as stock:
        assert torch.equal(stock.get_tensor(f"{hashed(keys[1], KEY).hex()}/bf16"), record["bf16"])


def test_a_tensor_that_is_written_into_changes_for_nobody_else(store: Store) -> None:
    store.read("image 0")["latents"].zero_()
    check(store, range(NUM))


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    writers = [spawn(tmp_path, first, first + 60, 1) for first in (0, 40)]  # both call themselves rank-0, and overlap
    assert [writer.wait() for writer in writers] == [0, 0]
    store = Store(tmp_path)
    check(store, range(100))
    assert not store.verify()


def test_a_killed_writer_leaves_what_it_completed(tmp_path: Path) -> None:
    """Kill it wherever it happens to be, then finish."""
    writer = spawn(tmp_path, 0, 5000, 1)
    assert writer.stdout
    writer.stdout.readline()
    while len(files(tmp_path, ".index")) < 20:
        time.sleep(0.002)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    store = Store(tmp_path)
    num_left = len(store)
    assert 80 <= num_left < 5000
    assert set(store.verify().values()) <= {"it has no index"}
    again = fill(store, range(num_left + 50))
    assert len(again) == 50
    check(store, range(num_left + 50))


@pytest.mark.parametrize("call", ["fsync of the data", "its naming", "fsync of the index", "naming of the index"])
def test_killed_at_any_step_of_a_shard(store: Store, call: str) -> None:
    name, count = {
        "fsync of the data": ("fsync", 3),
        "its naming": ("replace", 3),
        "fsync of the index": ("fsync", 4),
        "naming of the index": ("replace", 4),
    }[call]
    pid = os.fork()
    if pid == 0:
        owner = os if name == "fsync" else Path
        before, calls = getattr(owner, name), []

        def fatal(*arguments: object) -> object:
            calls.append(1)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return before(*arguments)

        setattr(owner, name, fatal)
        fill(store, range(2 * NUM))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    store = Store(store.folder)
    assert set(store.ignored.values()) <= {"it has no index"}
    check(store, range(NUM + 4))  # one more shard was completed, the next one not
    assert fill(store, range(2 * NUM)) == list(wanted(range(NUM + 4, 2 * NUM)))
    check(store, range(2 * NUM))
    store.sweep()
    assert len(files(store.folder)) > 20, "another writer may be at work"
    store.sweep(idle_s=0)
    assert len(files(store.folder)) == 20
    check(Store(store.folder), range(2 * NUM))
