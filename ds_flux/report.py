"""`ds-flux report RUN`: one page with everything that a run has shown of itself, in one HTML file without scripts or links."""

import base64
import html
import io
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from PIL import Image

from ds_flux import UserError
from ds_flux.flags import parse
from ds_flux.manifest import write_atomically

BY_SIGMA = "loss_by_sigma/"
MAX_EVENTS, MAX_IMAGES, MAX_SKIPPED = 8, 24, 50
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } .note { color: #666 }
table { border-collapse: collapse } td, th { padding: .15rem .7rem .15rem 0; text-align: left; vertical-align: top }
td.number { text-align: right; font-variant-numeric: tabular-nums } figure { margin: 0; display: inline-block; width: 49% }
svg { width: 100%; height: auto } .samples img { width: 8rem; display: block } details { margin: 1rem 0 }
"""
Rows = list[dict[str, Any]]
Series = dict[str, tuple[list[int], list[float]]]  # {label: (steps, values)}


@dataclass(frozen=True)
class Recorded:
    """What lies in a run's folder."""

    folder: Path
    settings: dict[str, Any]
    rows: Rows
    """of metrics.jsonl"""
    skipped: Rows
    plan: dict[str, float] | None
    """what was expected of a process"""
    scores: Rows
    """of scores.jsonl: what samples were worth, by whatever judges"""

    def series(self, *names: str) -> Series:
        """Of each figure the steps that have it, and what it was; one that was not finite is left out."""
        return series_of(self.rows, names)

    def names(self, prefix: str) -> list[str]:
        """Of the figures that begin so."""
        return sorted({name for row in self.rows for name in row if name.startswith(prefix)})


def series_of(rows: Rows, names: Iterable[str]) -> Series:
    """Of each figure the steps of the rows that have it, and what it was there."""
    found = {}
    for name in names:
        points = [(int(row["step"]), row[name]) for row in rows if row.get(name) is not None]
        if points:
            found[name] = ([step for step, _ in points], [value for _, value in points])
    return found


def write(run: Path, output: Path | None = None) -> Path:
    """Write the page of the run in a folder, by default into that folder; returns where it is.

    Raises:
        UserError: there is no run, or the page cannot be written.
    """
    recorded, path = read(run), output or run / "report.html"
    try:
        write_atomically(path, page(recorded))
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    return path


def main(argv: list[str]) -> int:
    """`ds-flux report RUN`."""
    parser = ArgumentParser(prog="ds-flux report", exit_on_error=False)
    parser.add_argument("run", type=str, help="folder of the run")
    parser.add_argument("--output", type=str, help="the page; default: report.html in the run's folder")
    settings = parse(parser, argv)
    print(write(Path(settings.run), Path(settings.output) if settings.output else None))
    return 0


def read(run: Path) -> Recorded:
    """What a run has recorded so far; it may still be going on.  Raises UserError where there is no run."""
    figures = run / "logs/metrics.jsonl"
    if not figures.is_file():
        raise UserError(f"{run} is no run's folder: there is no logs/metrics.jsonl in it")
    settings, plan = run / "config.yaml", run / "plan.json"
    return Recorded(
        folder=run,
        settings=yaml.safe_load(settings.read_text()) if settings.is_file() else {},
        rows=lines_of(figures),
        skipped=lines_of(run / "skipped.jsonl"),
        plan=json.loads(plan.read_text()) if plan.is_file() else None,
        scores=lines_of(run / "logs/scores.jsonl"),
    )


def lines_of(path: Path) -> Rows:
    """Of a file of JSON lines that may be just being written; none where there is no file."""
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def page(recorded: Recorded) -> str:
    """The whole page."""
    title = html.escape(f"ds_flux: {recorded.folder.resolve().name}")
    parts = [summary(recorded), charts(recorded), samples(recorded.folder / "samples"), left_out(recorded), settings(recorded)]
    body = f"<h1>{title}</h1>" + "".join(parts)
    return f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>{body}</html>\n'


def summary(recorded: Recorded) -> str:
    """The figures that matter, from beginning to end."""
    facts: list[tuple[str, str]] = []
    for name, (steps, values) in recorded.series("loss", "validation_loss", "validation_loss_ema").items():
        span = f"{values[0]:.4f} at step {steps[0]}, {values[-1]:.4f} at step {steps[-1]}"
        facts.append((name, f"{span}; lowest {min(values):.4f} at step {steps[values.index(min(values))]}"))
    for name, (steps, values) in scored(recorded.scores).items():
        facts.append((name, f"{values[0]:.4g} at step {steps[0]}, {values[-1]:.4g} at step {steps[-1]}"))
    speeds = [row["images_per_s"] for row in recorded.rows[1:] if row.get("images_per_s")]
    if speeds:
        facts.append(("images per second", f"{median(speeds):.3g} (median of the steps)"))
    parts = {name: values for name, (_, values) in recorded.series(*parts_of_a_step(recorded)).items()}
    if parts:
        said = ", ".join(f"{name.partition('/')[2].replace('_', ' ')} {median(values):.3g} s" for name, values in parts.items())
        facts.append(("parts of a step", f"{said} (medians)"))
    for where in ("device", "host"):
        peaks = [row[f"peak_{where}_memory_gib"] for row in recorded.rows if row.get(f"peak_{where}_memory_gib")]
        planned = (recorded.plan or {}).get(f"{where}_gib")
        said = f"; planned for the run's own part of it: {planned:.3g} GiB" if planned else ""
        facts += [(f"peak {where} memory", f"{max(peaks):.3g} GiB of the process that has most{said}")] if peaks else []
    not_taken = [str(row["step"]) for row in recorded.rows if row.get("skipped")]
    facts += [("steps not taken", f"{len(not_taken)}: {', '.join(not_taken[:20])}")] if not_taken else []
    return table(facts)


def charts(recorded: Recorded) -> str:
    """One figure for each kind of curve that there is."""
    by_sigma = recorded.series(*recorded.names(BY_SIGMA))
    validation = recorded.series(*recorded.names("validation_loss_by_sigma/"))
    figures = [
        ("Training loss", smoothed(recorded.series("loss"))),
        ("Training loss by noise level", smoothed(by_sigma, also_raw=False)),
        ("Validation loss", recorded.series("validation_loss", "validation_loss_ema")),
        ("Validation loss by noise level", validation),
        *((in_words(name), {name: points}) for name, points in scored(recorded.scores).items()),
        ("Gradient norm before clipping", smoothed(recorded.series("grad_norm"))),
        ("Learning rate", recorded.series("lr")),
        ("Images per second", recorded.series("images_per_s")),
        ("Tokens per second", recorded.series("tokens_per_s")),
        ("Computed by each process (1e12 operations per second)", recorded.series("model_tflops_per_s")),
        ("Share of the device's peak", recorded.series("mfu")),
        ("Where the time goes (seconds per step)", smoothed(recorded.series(*parts_of_a_step(recorded)), also_raw=False)),
        ("Peak memory (GiB)", recorded.series("peak_host_memory_gib", "peak_device_memory_gib")),
    ]
    drawn = "".join(f"<figure>{chart(title, series)}</figure>" for title, series in figures if series)
    return f"<h2>Curves</h2>{drawn}"


def parts_of_a_step(recorded: Recorded) -> list[str]:
    """What every step has, the whole of it included; saving and validation come now and then."""
    return [name for name in recorded.names("time_s/") if not name.endswith(("/saving", "/validation"))]


def scored(scores: Rows) -> Series:
    """Every figure of the scores, step by step; of two at one step the later one counts."""
    latest: dict[int, dict[str, Any]] = defaultdict(dict)
    for row in scores:
        latest[int(row["step"])] |= {name: value for name, value in row.items() if isinstance(value, int | float)}
    rows = [latest[step] for step in sorted(latest)]
    return series_of(rows, sorted({name for row in rows for name in row} - {"step"}))


def in_words(name: str) -> str:
    """A figure's name as a title."""
    return name.replace("_", " ").capitalize()


def smoothed(series: Series, also_raw: bool = True) -> Series:
    """Moving averages over a fiftieth of the steps, beside what they are of."""
    found = {}
    for name, (steps, values) in series.items():
        width = max(1, len(values) // 50)
        means = [sum(part) / len(part) for end in range(len(values)) for part in [values[max(0, end - width + 1) : end + 1]]]
        found |= {name: (steps, values)} if also_raw or width == 1 else {}
        found |= {f"{name}, mean of {width}": (steps, means)} if width > 1 else {}
    return found


def chart(title: str, series: Series) -> str:
    """A figure as SVG.  Raises UserError where there is nothing to draw with."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("the report is drawn with matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for name, (steps, values) in series.items():
        is_raw = any(other.startswith(f"{name}, mean of") for other in series)
        label = name.rpartition("/")[2] if "/" in name else name
        axes.plot(steps, values, label=label, alpha=0.3 if is_raw else 1.0, marker="." if len(steps) < 30 else "")
    axes.set_title(title)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if len(series) > 1:
        axes.legend(fontsize="x-small", ncols=1 + len(series) // 7)
    file = io.StringIO()
    with rc_context({"svg.hashsalt": title, "svg.fonttype": "path"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue().partition("<svg")[1] + file.getvalue().partition("<svg")[2]


def samples(folder: Path) -> str:
    """Images of the same prompt and noise beside each other, event by event."""
    events = sorted(folder.glob("step-*"), key=lambda path: (int(path.name.split("-")[1]), path.name))
    if not events:
        return ""
    num_shown = min(len(events), MAX_EVENTS)  # the first, the last, and some between
    shown = [events[round(number * (len(events) - 1) / max(1, num_shown - 1))] for number in range(num_shown)]
    names = sorted({path.name for event in shown for path in event.glob("*.png")})
    head = "".join(f"<th>{html.escape(event.name)}</th>" for event in shown)
    lines = [f"<tr><th>prompt</th>{head}</tr>"]
    for name in names[:MAX_IMAGES]:
        prompt = next((text_of(event / name) for event in shown if (event / name).is_file()), "")
        lines.append(f"<tr><td>{html.escape(prompt)}</td>{''.join(f'<td>{image(event / name)}</td>' for event in shown)}</tr>")
    more = f'<p class="note">{len(names) - MAX_IMAGES} more images are in the folder</p>' if len(names) > MAX_IMAGES else ""
    return f'<h2>Samples</h2><table class="samples">{"".join(lines)}</table>{more}'


def text_of(path: Path) -> str:
    """The prompt that is written in an image."""
    with Image.open(path) as opened:
        opened.load()
        return str(opened.info.get("prompt", ""))


def image(path: Path) -> str:
    """An image in the page itself."""
    if not path.is_file():
        return ""
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}">'


def left_out(recorded: Recorded) -> str:
    """Samples that could not be used."""
    if not recorded.skipped:
        return ""
    rows = [(row["name"], row["reason"]) for row in recorded.skipped[:MAX_SKIPPED]]
    more = f" (the first {MAX_SKIPPED})" if len(recorded.skipped) > MAX_SKIPPED else ""
    return f"<h2>Samples left out: {len(recorded.skipped)}{more}</h2>{table(rows)}"


def settings(recorded: Recorded) -> str:
    """Everything that was set."""
    rows = [(name, "" if value is None else str(value)) for name, value in recorded.settings.items()]
    return f"<details><summary>All settings</summary>{table(rows)}</details>"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Two columns."""
    lines = "".join(f"<tr><th>{html.escape(name)}</th><td>{html.escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{lines}</table>"
