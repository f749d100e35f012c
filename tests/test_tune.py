"""The search: halving on a recorded table, a real one of two trials of which one fails, going on, bad input."""

import csv
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ds_flux import commands, config
from ds_flux.halving import best_of, rungs_of
from ds_flux.plan import Setting
from ds_flux.trials import Candidate, Trials
from ds_flux.tune import in_turns, machine_of, num_changes, still_promising
from tests.conftest import Assets, Done
from tests.test_errors import one_line

RunMain = Callable[..., Done]
RECORDED = {"a": 5.0, "b": 7.0, "c": 0.0, "d": 9.0, "e": 8.5, "f": 20.0}  # images per second; 0: it failed
SHORT = {"d": 4.0, "e": 8.0}  # what a few steps say of them


@pytest.mark.parametrize("num_trials", range(1, 40))
def test_rungs_keep_the_budget(num_trials: int) -> None:
    rungs = rungs_of(num_trials)
    assert sum(rungs) <= num_trials and rungs == sorted(rungs, reverse=True)
    assert num_trials < 2 or rungs[-1] == 2


def test_halving_on_a_recorded_table() -> None:
    """A failed trial gives its place to the next; the better half is measured longer; the longest measurement decides."""
    calls: list[tuple[str, int]] = []

    def measure(name: str, num_steps: int) -> float:
        calls.append((name, num_steps))
        return SHORT.get(name, RECORDED[name]) if num_steps == 3 else RECORDED[name]

    assert best_of("abcdef", measure, num_trials=8, num_steps=3) == "e"
    assert calls == [("a", 3), ("b", 3), ("c", 3), ("d", 3), ("e", 3), ("e", 6), ("b", 6)]
    assert best_of("c", measure, 8, 3) is None
    assert best_of("abe", lambda name, steps: RECORDED[name] if steps == 3 else 0.0, 5, 3) == "a", "all fail in the longer run"
    assert best_of("cab", measure, 2, 3) == "a", "a failed trial counts"


def test_the_search_looks_at_every_config_and_then_around_the_best() -> None:
    settings = [Setting(deepspeed_config=path, gradient_checkpointing=checkpointing, train_batch_size=size,
                        gradient_accumulation_steps=4 // size)
                for path in "ab" for checkpointing in (False, True) for size in (4, 2)]  # fmt: skip
    candidates = [Candidate(setting) for setting in settings]
    assert [one.setting.deepspeed_config for one in in_turns(candidates)] == list("abababab")
    assert in_turns(candidates)[0] == candidates[0]
    changed = [num_changes(setting, settings[0]) for setting in settings[:4]]
    assert changed == [0, 1, 1, 2]


def test_what_took_too_much_rules_out_what_should_take_more(flags: list[str], tmp_path: Path) -> None:
    settings, command = config.load(flags, "test", commands.TuneCommand)
    trials = Trials(settings, machine_of(command)[0], tmp_path / "tune", None, 1, bound_gib=1.0)
    own = Setting.of(settings)
    planned = {Candidate(replace(own, train_batch_size=size)): gib for size, gib in ((4, 0.5), (3, 0.46), (2, 0.3), (1, 0.6))}
    promising = still_promising(list(planned), planned, trials)
    first = next(promising)
    assert first.setting.train_batch_size == 4
    trials.launch = lambda command: ("timed out", "")  # type: ignore[method-assign]
    row = {"images_per_s": 2.0, "peak_device_memory_gib": 0.0, "peak_host_memory_gib": 1.5}
    trials.results["first"] = trials.judged(trials.run(first, 2), [row])
    assert [one.setting.train_batch_size for one in promising] == [2], "3 should take hardly less than 4, and 1 more"


@pytest.fixture
def flags(assets: Assets, tmp_path: Path) -> list[str]:
    """Of a search over two DeepSpeed configs, one of which passes all checks and fails when the engine starts."""
    (tmp_path / "configs").mkdir()
    broken = {"zero_optimization": {"stage": 2, "compute_grad_norm": False}}
    (tmp_path / "configs/broken.json").write_text(json.dumps(broken))
    own = dict(train_batch_size=1, deepspeed_config=assets.ds_config(0), cache_latents="true", logging_steps=50)
    bounds = ["--num_gpus", "1", "--ds_configs", str(tmp_path / "configs"), "--folder", str(tmp_path / "tune")]
    return [*assets.flags(tmp_path / "run", **own), *bounds, "--trials", "2", "--refinements", "0", "--steps", "2"]


def test_a_search_of_two_trials(flags: list[str], tmp_path: Path, run_main: RunMain, monkeypatch: pytest.MonkeyPatch) -> None:
    """One works and one fails; the best is written; a second start measures nothing again; a trial leaves no checkpoint."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = run_main("tune", *flags)
    assert done.status == 0, done.errors
    rows = list(csv.DictReader((tmp_path / "tune/trials.csv").open()))
    assert sorted(row["status"] for row in rows) == ["failed", "ok"]
    assert "trial 1: " in done.errors and " images/s with " in done.errors and ": failed, in " in done.errors
    failed, ok = sorted(rows, key=lambda row: row["status"])
    assert "gradient_clipping" in failed["said"] and float(ok["images_per_s"]) > 0 and float(ok["peak_gib"]) > 0.1
    assert (tmp_path / "tune/trials.png").read_bytes()[:4] == b"\x89PNG"
    tuned = json.loads((tmp_path / "tune/ds_config.tuned.json").read_text())
    assert tuned["zero_optimization"]["stage"] == 0 and "ds_config.tuned.json" in done.output

    lines = (tmp_path / "tune/trials.jsonl").read_text()
    assert run_main("tune", *flags).status == 0
    assert (tmp_path / "tune/trials.jsonl").read_text() == lines

    settings, command = config.load(flags, "test", commands.TuneCommand)
    trials = Trials(settings, machine_of(command)[0], tmp_path / "tune", None, 200, float("inf"))
    candidate = Candidate(Setting.of(settings))
    path = tmp_path / "one.json"
    path.write_text(json.dumps(candidate.ds_config()))
    status, said = trials.launch(trials.command(candidate, path, tmp_path / "one", 2))
    assert status == "ok" and "planned for each process" in said and "at the peak: " in said, said
    assert len((tmp_path / "one/logs/metrics.jsonl").read_text().splitlines()) == 2
    assert not list((tmp_path / "one").glob("checkpoint-*"))


def test_trials_that_hang_or_take_too_much(flags: list[str], tmp_path: Path) -> None:
    """Both are results."""
    settings, command = config.load(flags, "test", commands.TuneCommand)
    trials = Trials(settings, machine_of(command)[0], tmp_path / "tune", None, 1, bound_gib=0.5)
    began = time.monotonic()
    assert trials.launch(["sleep", "100"]) == ("timed out", "no end after 1 s")
    assert time.monotonic() - began < 60  # not 100
    assert trials.launch(["sh", "-c", "echo rank 1 ran out of memory; exit 3"])[0] == "out of memory"
    row = {"images_per_s": 2.0, "peak_device_memory_gib": 0.0, "peak_host_memory_gib": 0.75}
    trials.launch = lambda command: ("timed out", "")  # type: ignore[method-assign]
    result = trials.run(Candidate(Setting.of(settings)), 2)
    assert result.status == "timed out" and trials.judged(result, [row, row]).status == "over the bound"


BAD = [
    (["--num_gpus", "0"], "--num_gpus 0 must be more than 0"),
    (["--steps", "1"], "the first step warms up"),
    (["--nodes", "2"], "--nodes 2 needs --hostfile"),
    (["--hostfile", "nowhere"], "--hostfile nowhere: no such file"),
    (["--memory_gib", "0"], "--memory_gib 0 must be more than 0"),
    (["--memory_gib", "0.0001"], "by the plan nothing fits 0.0001 GiB"),
    (["--ds_configs", "nowhere"], "--ds_configs nowhere: no DeepSpeed configs"),
]


@pytest.mark.parametrize(("own", "message"), BAD)
def test_bad_input(flags: list[str], run_main: RunMain, own: list[str], message: str) -> None:
    one_line(run_main("tune", *flags, *own), message)
