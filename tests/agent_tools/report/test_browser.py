"""The page, which has no script, in a real browser in both themes; needs `chromium`."""

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import pytest

from zeromismatch.agent_tools.plots import HeatMap
from zeromismatch.agent_tools.report import ReportData, Speed, write_report

from .test_report import full_report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip
WIDTH, HEIGHT = 1100, 1600

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on the path")


def browse(page: Path, profile: Path, *arguments: str) -> str:
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *FLAGS, f"--user-data-dir={profile}", *arguments, page.as_uri()],
        capture_output=True, text=True, check=True, timeout=240,
    )  # fmt: skip
    return done.stdout


def pixels(file: Path) -> tuple[int, int, list[tuple[int, ...]]]:
    """Width, height and the pixels of an 8-bit PNG, every eighth of every eighth row."""
    data, at, packed = file.read_bytes(), 8, b""
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert depth == 8
    channels = {2: 3, 6: 4}[kind]
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            packed += data[at + 8 : at + 8 + length]
        at += length + 12
    raw, stride = zlib.decompress(packed), width * channels
    before, found = bytearray(stride), []
    for row in range(height):
        start = row * (stride + 1)
        line = unfiltered(raw[start], bytearray(raw[start + 1 : start + 1 + stride]), before,
                          channels)  # fmt: skip
        if row % 8 == 0:
            found += [tuple(line[x * channels : x * channels + 3]) for x in range(0, width, 8)]
        before = line
    return width, height, found


def unfiltered(kind: int, line: bytearray, above: bytearray, channels: int) -> bytearray:
    """One row of a PNG as it was before its filter."""
    if kind == 2:
        return bytearray((a + b) & 255 for a, b in zip(line, above, strict=True))
    for at in range(len(line) if kind else 0):
        left = line[at - channels] if at >= channels else 0
        corner = above[at - channels] if at >= channels else 0
        if kind == 1:
            guess = left
        elif kind == 3:
            guess = (left + above[at]) // 2
        else:
            guess = min(
                (left, above[at], corner), key=lambda each: abs(left + above[at] - corner - each)
            )
        line[at] = (line[at] + guess) & 255
    return line


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    heat = HeatMap(
        rows=("embed_tokens", *(f"layer {n}" for n in range(4))),
        spans=(("chat-00", 40), ("chat-01", 30)),
        cells=tuple(tuple((token * row) % 5 for token in range(70)) for row in range(5)),
    )
    data = full_report()
    shown = data.comparisons[0].model_copy(update={"heat": heat})
    speed = Speed(name="packed", value=5132.0, unit="tokens/s", relative=1.2, against="stock")
    data = ReportData.model_validate(
        data.model_dump() | {"comparisons": (shown,), "speeds": (speed,)}
    )
    return write_report(tmp_path_factory.mktemp("page") / "report.html", data)


@pytest.mark.slow
def test_both_themes_are_drawn_with_every_plot(page: Path, tmp_path: Path) -> None:
    themes = {}
    for theme, flag in (("light", "--force-light-mode"), ("dark", "--force-dark-mode")):
        shot = tmp_path / f"{theme}.png"
        browse(page, tmp_path / theme, flag, f"--window-size={WIDTH},{HEIGHT}",
               f"--screenshot={shot}")  # fmt: skip
        width, height, colours = pixels(shot)
        assert (width, height) == (WIDTH, HEIGHT)
        assert len(set(colours)) > 20  # text, bands of the heat map, bars, pills
        themes[theme] = max(set(colours), key=colours.count)
    assert min(themes["light"]) > 200
    assert max(themes["dark"]) < 60


@pytest.mark.slow
def test_the_browser_reads_the_whole_page(page: Path, tmp_path: Path) -> None:
    document = browse(page, tmp_path / "profile", "--dump-dom")
    for expected in ("DIVERGENT", "layer 3", "2-3 ulp", "5,132.0 tokens/s", "zm doctor", "</html>"):
        assert expected in document
    assert document.count("<rect") > 60
