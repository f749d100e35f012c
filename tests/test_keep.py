"""`ds-flux checkpoint list|verify|prune`."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ds_flux.manifest import MANIFEST, Manifest, checksum


def write(folder: Path, step: int, lora: dict[str, Any] | None = None) -> Path:
    """A checkpoint of two files of 1,000 bytes."""
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir(parents=True)
    for name in ("a.pt", "b.pt"):
        (checkpoint / name).write_bytes(os.urandom(1000))
    manifest = Manifest(
        step=step, family="f", transformer_class="T", transformer_config={}, base_fingerprint="", lora=lora, zero_stage=3,
        world_size=2, data={}, files={"a.pt": 1000, "b.pt": 1000},
        checksums={name: checksum(checkpoint / name) for name in ("a.pt", "b.pt")},
    )  # fmt: skip
    (checkpoint / MANIFEST).write_text(json.dumps(asdict(manifest)))
    return checkpoint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints 1 to 4 of which 3 is cut short, and two torn ones: an old one and one that is being written."""
    run = tmp_path / "run"
    for step in (1, 2, 3):
        write(run, step)
    write(run, 10, {"rank": 8, "alpha": 8})
    (run / "checkpoint-3/a.pt").write_bytes(b"short")
    for name, age_s in (("checkpoint-4.partial", 5000), ("checkpoint-11.partial", 5)):
        (run / name).mkdir()
        (run / name / "a.pt").write_bytes(b"torn")
        for path in (run / name / "a.pt", run / name):
            os.utime(path, (time.time() - age_s, time.time() - age_s))
    (run / "latest").write_text("checkpoint-2")
    return run


def test_list(run: Path, run_main: Any) -> None:
    done = run_main("checkpoint", "list", run)
    assert done.status == 0, done.errors
    lines = done.output.splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint-10"]
    assert lines[0].endswith("step 1, stage 3, 2 processes, full, whole")
    assert lines[1].endswith("whole, latest")
    assert lines[2].endswith("lacks: a.pt has 5 bytes, 1000 were written")
    assert lines[3].endswith("LoRA of rank 8, whole") and "2.3 kB" in lines[3] and time.strftime("%Y-") in lines[3]
    assert [line.split()[0] for line in lines[4:]] == ["checkpoint-11.partial", "checkpoint-4.partial"]
    assert all(line.endswith("torn") for line in lines[4:])


def test_verify(run: Path, run_main: Any) -> None:
    assert run_main("checkpoint", "verify", run / "checkpoint-1").status == 0
    content = bytearray((run / "checkpoint-1/b.pt").read_bytes())
    content[500] ^= 1
    (run / "checkpoint-1/b.pt").write_bytes(content)
    (run / "checkpoint-2" / MANIFEST).write_text("{")
    (run / "checkpoint-10/b.pt").unlink()
    done = run_main("checkpoint", "verify", run)
    assert done.status == 2
    *named, last = done.output.splitlines()
    assert [line.removeprefix(f"{run}/").split(" ")[0] for line in named] == [f"checkpoint-{n}" for n in (1, 2, 3, 10)]
    assert named[0].endswith("is not whole: b.pt does not hold what was written (its checksum differs)")
    assert f"{MANIFEST} cannot be read" in named[1] and "a.pt has 5 bytes" in named[2] and "b.pt is missing" in named[3]
    assert last == "0 of 4 checkpoints are whole"


def test_prune(run: Path, run_main: Any) -> None:
    done = run_main("checkpoint", "prune", run, "--keep", 1)
    assert done.status == 0, done.errors
    # 2 is what latest names, 3 is not whole, and 11 may be being written
    assert {path.name for path in run.iterdir()} == {
        "checkpoint-2", "checkpoint-3", "checkpoint-10", "checkpoint-11.partial", "latest",
    }  # fmt: skip
    lines = done.output.splitlines()
    assert [line.split(" (")[0] for line in lines if line.startswith("deleted")] == [
        f"deleted {run}/checkpoint-4.partial", f"deleted {run}/checkpoint-1",
    ]  # fmt: skip
    assert len([line for line in lines if line.startswith("left")]) == 2
    assert lines[-1].startswith("freed 2.3 kB")
    assert run_main("checkpoint", "prune", run, "--keep", 1).output.endswith("freed 0 bytes\n")


BAD = {
    "an action": (["lst", "{run}"], "unknown action lst"),
    "no run": (["list"], "run"),
    "no folder": (["list", "./nowhere"], "nowhere: no such folder"),
    "nothing there": (["verify", "{run}/checkpoint-4.partial"], "has no checkpoints"),
    "no --keep": (["prune", "{run}"], "prune needs --keep N"),
    "--keep 0": (["prune", "{run}", "--keep", "0"], "1 or more"),
    "--keep all": (["prune", "{run}", "--keep", "all"], "--keep"),
    "a flag": (["list", "{run}", "--kep", "3"], "unknown flag: --kep"),
    "a checkpoint": (["prune", "{run}/checkpoint-1", "--keep", "1"], "is a checkpoint: give the folder of its run"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_input_is_one_line(run: Path, run_main: Any, kind: str) -> None:
    words, said = BAD[kind]
    before = sorted(run.rglob("*"))
    done = run_main("checkpoint", *(word.format(run=run) for word in words))
    assert (done.status, len(done.errors.splitlines())) == (2, 1), done.errors
    assert done.errors.startswith("ds-flux: error: ") and said in done.errors
    assert sorted(run.rglob("*")) == before


def test_starts_light(run: Path) -> None:
    code = "import sys; from ds_flux import keep; keep.main(sys.argv[1:]); print({'torch', 'deepspeed'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, "list", run], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stderr
