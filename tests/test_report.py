"""One page of a run, that needs nothing beside itself."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ds_flux import demo
from ds_flux.report import chart, scored, smoothed
from ds_flux.sampling import as_png
from tests.conftest import Assets
from tests.test_errors import one_line


class Page(HTMLParser):
    """The tags of a page, each with its attributes, and its text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def run(assets: Assets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real one, with all that a page can show, and a sample whose name would be markup."""
    from tests.distributed import run_jobs

    folder = tmp_path_factory.mktemp("report")
    flags = {
        "max_train_steps": 3, "validation_steps": 2, "validation_fraction": 0.3, "ema_decay": 0.5,
        "validation_prompt": "<b>zero</b>", "num_validation_images": 2, "num_validation_inference_steps": 1,
        "deepspeed_config": assets.ds_config(0),
    }  # fmt: skip
    run_jobs(1, [assets.flags(folder / "run", **flags)], folder)
    scores = [
        {"step": 2, "clip_score": 20.0, "by": "<u>someone"},
        {"step": 2, "clip_score": 21.5},
        {"step": 3, "clip_score": 25.25},
    ]
    (folder / "run/logs/scores.jsonl").write_text("".join(json.dumps(score) + "\n" for score in scores))
    (folder / "run/skipped.jsonl").write_text(json.dumps({"sample": 1, "name": "<i>a.png", "reason": "empty"}) + "\n")
    return folder / "run"


def test_the_page_shows_what_was_recorded(run: Path, run_main: Any) -> None:
    done = run_main("report", run)
    assert (done.status, done.output.strip()) == (0, str(run / "report.html")), done.errors
    text = (run / "report.html").read_text()
    page = Page(text)
    rows = [json.loads(line) for line in (run / "logs/metrics.jsonl").read_text().splitlines()]
    assert f"{rows[-1]['validation_loss']:.4f} at step 3" in page.text
    assert "planned for the run's own part of it" in page.text
    assert {"<b>zero</b>", "<i>a.png"} <= set(re.findall(r"<b>zero</b>|<i>a.png", page.text)), "text, and no markup"
    tags = [tag for tag, _ in page.tags]
    assert "b" not in tags and "i" not in tags and "script" not in tags and "link" not in tags
    assert tags.count("svg") == 12
    assert "21.5 at step 2, 25.25 at step 3" in page.text, "of two at one step the later one"
    images = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    assert len(images) == 2 * 4 and all(str(source).startswith("data:image/png;base64,") for source in images)
    assert "step-2-ema" in page.text and "learning_rate" in page.text
    assert not re.search(r"""(src|href)=["']?https?:""", text), "nothing is fetched"


def test_a_run_that_goes_on_has_a_page_too(run: Path, tmp_path: Path, run_main: Any) -> None:
    """A line that is being written, and figures that are not finite."""
    logs = tmp_path / "young/logs"
    logs.mkdir(parents=True)
    row = {"step": 1, "loss": None, "grad_norm": 1.0, "skipped": True, "images_per_s": 2.0}
    (logs / "metrics.jsonl").write_text(json.dumps(row) + "\n" + '{"step": 2, "lo')
    done = run_main("report", tmp_path / "young", "--output", tmp_path / "page.html")
    assert done.status == 0, done.errors
    assert "steps not taken" in (tmp_path / "page.html").read_text()


def test_no_run_is_one_line(tmp_path: Path, run_main: Any) -> None:
    one_line(run_main("report", tmp_path), "is no run's folder: there is no logs/metrics.jsonl in it")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/metrics.jsonl").write_text("")
    one_line(run_main("report", tmp_path, "--output", tmp_path / "no/where.html"), "where.html cannot be written")


def test_the_digits_of_each_event_are_judged(tmp_path: Path) -> None:
    """Real digits, one of them under a wrong name; what others have written stays, what is written anew is not doubled."""
    images, labels = demo.digits()
    for step, wrong in ((100, 3), (20, 5)):
        folder = tmp_path / f"samples/step-{step}"
        folder.mkdir(parents=True)
        for number in range(10):
            prompt = demo.caption((labels[10 + number] + (number < wrong)) % 10)
            (folder / f"{number:04d}.png").write_bytes(as_png(images[10 + number], {"prompt": prompt}))
    (tmp_path / "samples/step-20/9999.png").write_bytes(as_png(images[0], {"prompt": "a cat"}))
    (tmp_path / "samples/step-20-ema").mkdir()
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs/scores.jsonl"
    path.write_text(json.dumps({"step": 20, "fid": 3.5}) + "\n")
    for _ in range(2):
        assert demo.recognised_shares(tmp_path) == {20: 0.5, 100: 0.7}
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert rows == [{"step": 20, "fid": 3.5}, {"step": 20, "recognised_share": 0.5}, {"step": 100, "recognised_share": 0.7}]
    assert scored(rows) == {"fid": ([20], [3.5]), "recognised_share": ([20, 100], [0.5, 0.7])}
    assert demo.recognised_shares(tmp_path / "nothing") == {}


def test_curves() -> None:
    series = {"loss": (list(range(100)), [float(step) for step in range(100)])}
    means = smoothed(series)
    assert list(means) == ["loss", "loss, mean of 2"]
    assert means["loss, mean of 2"][1][:3] == [0.0, 0.5, 1.5]
    assert chart("a < b", series).startswith("<svg") and "a &lt; b" not in chart("t", series)
