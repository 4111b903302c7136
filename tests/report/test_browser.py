"""The page as a reader sees it: headless Chromium opens every kind of run, wide and on a phone."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

# Parts that reach past the right edge, except those in a box that scrolls.
OVERFLOWING = """[...document.body.querySelectorAll('*')]
  .filter(e => !e.parentElement.closest('.scroll, svg'))
  .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)
  .map(e => `${e.tagName} ${e.textContent.slice(0, 40)}`)"""
PICTURES = """[...document.querySelectorAll('svg')].map(e => {
  const box = e.getBoundingClientRect(), drawn = e.getBBox();
  return {name: e.getAttribute('aria-label'), role: e.getAttribute('role'),
          size: Math.min(box.width, box.height), drawn: Math.max(drawn.width, drawn.height)}})"""
HEADINGS = "[...document.querySelectorAll('h1,h2,h3')].map(e => +e.tagName[1])"
BROKEN_TEXT = """document.body.innerText.match(/NaN|undefined|\\bNone\\b|\\binf\\b|Infinity/g)"""
# The smallest contrast of a text with what lies right behind it (WCAG 2), and where it is.
CONTRAST = """(() => {
  const light = c => { const v = c.map(x => (x /= 255) <= 0.04045 ? x / 12.92
    : ((x + 0.055) / 1.055) ** 2.4); return 0.2126 * v[0] + 0.7152 * v[1] + 0.0722 * v[2]; };
  const numbers = s => s.match(/[\\d.]+/g).map(Number);
  const over = (top, ground, a) => top.slice(0, 3).map((x, i) => a * x + (1 - a) * ground[i]);
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgb = s => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = s;
    canvas.fillRect(0, 0, 1, 1); return [...canvas.getImageData(0, 0, 1, 1).data]; };
  const found = [];
  for (const e of document.body.querySelectorAll('*')) {
    if (![...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())) continue;
    if (['title', 'summary'].includes(e.tagName) || !e.getClientRects().length) continue;
    const style = getComputedStyle(e), inside = e.closest('svg');
    let ground = [255, 255, 255];
    const cell = e.previousElementSibling;
    if (inside && cell && cell.tagName == 'rect' && e.getAttribute('class')?.match(/on|off/)) {
      const shade = getComputedStyle(cell);
      ground = over(rgb(shade.fill), rgb(getComputedStyle(
        inside.querySelector('.ground')).fill), Number(shade.fillOpacity));
    }
    const ink = rgb(inside ? style.fill : style.color);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => x - y);
    found.push([(b + 0.05) / (a + 0.05), e.textContent.slice(0, 30)]);
  }
  return found.sort((x, y) => x[0] - y[0])[0];
})()"""


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_opens_cleanly(browser, run, width):
    browser.open(run / "report.html", width)
    assert browser.find("[...document.querySelectorAll('details')].map(e => e.open = true).length")

    assert browser.find("document.documentElement.scrollWidth") == width
    assert browser.find(OVERFLOWING) == []
    pictures = browser.find(PICTURES)
    assert all(p["name"] and p["role"] == "img" for p in pictures)
    assert all(min(p["size"], p["drawn"]) > 1 for p in pictures), pictures
    assert browser.find("document.querySelectorAll('img, script, iframe, link').length") == 0
    headings = browser.find(HEADINGS)
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(headings))
    assert not browser.find(BROKEN_TEXT)
    assert browser.find(CONTRAST)[0] >= 4.5, browser.find(CONTRAST)
    assert complaints(browser) == []
    assert requests(browser) == {(run / "report.html").resolve().as_uri()}


# How many pictures each kind of run has: curves, matrix or scatters, series, spectrum.
@pytest.mark.parametrize(
    ("run", "count"),
    [
        ("everything", 3 + 1 + 12 + 2 * 3 + 1),
        ("regression", 2 + 2 + 1),
        ("closed form", 1),
        ("events", 3),
        ("no mistakes", 3 + 1 + 2 * 3 + 1),
        ("one epoch", 3 + 1 + 12 + 2 * 3 + 1),
        ("nans", 3 + 1 + 1 + 2 * 3 + 1),
        ("deep", 3 + 1 + 12 + 6 * 3 + 1),
        ("interrupted", 3),
    ],
    indirect=["run"],
)
def test_every_picture_is_there(browser, run, count):
    browser.open(run / "report.html", 1280)
    assert browser.find("document.querySelectorAll('svg').length") == count


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        ("<script>throw new Error('broken')</script>", "broken"),
        ("<script>console.error('loud')</script>", "loud"),
        ("<img src='absent.png'>", "ERR_FILE_NOT_FOUND"),
    ],
)
def test_a_broken_page_is_noticed(browser, tmp_path, broken, told):
    page = tmp_path / "report.html"
    page.write_text(f"<!doctype html><body>{broken}</body>")
    browser.open(page, 1280)
    assert told in json.dumps(complaints(browser))


def complaints(browser) -> list:
    """Return errors of scripts, of the console, of requests."""
    return [
        event
        for event in browser.events
        if event["method"] in ("Runtime.exceptionThrown", "Network.loadingFailed")
        or event["params"].get("entry", event["params"]).get("level") in ("error", "warning")
        or event["params"].get("type") in ("error", "warning", "assert")
    ]


def requests(browser) -> set[str]:
    sent = (e["params"] for e in browser.events if e["method"] == "Network.requestWillBeSent")
    return {each["request"]["url"] for each in sent}


def test_the_page_weighs_little(run):
    assert Path(run, "report.html").stat().st_size < 1_500_000
