"""The report as a person sees it, at phone and desktop width, in light and dark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.by import By

SIX = ("base", "marathon-sft", "marathon", "sprint", "soup", "sao")
WIDER_THAN_PAGE = """
return [...document.querySelectorAll('main *, header *')]
  .filter(e => !e.closest('.scroll') && !e.closest('svg') && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.tagName + '.' + e.className)"""
CONTRASTS = """
const rgb = c => c.match(/[\\d.]+/g).map(Number);
const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const light = c => { const [r, g, b] = rgb(c).map(v => linear(v / 255));
  return .2126 * r + .7152 * g + .0722 * b; };
const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (rgb(c).length < 4 || rgb(c)[3] > 0) return c; } return 'rgb(255,255,255)'; };
const texts = 'p, b, dt, dd, th, td, a, mark, summary, .note, .badge, .verdict, .role, h1, h2, h3';
return [...document.querySelectorAll(texts)]
  .filter(e => e.textContent.trim() && e.offsetParent)
  .map(e => { const a = light(getComputedStyle(e).color), b = light(behind(e));
    return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.tagName + '.' + e.className]; })
  .sort((x, y) => x[0] - y[0])[0]"""


@pytest.mark.parametrize("width", [390, 1280])
def test_no_horizontal_page_scroll_and_all_candidates(browse: Any, report: str, width: int, tmp_path: Path) -> None:
    browser = browse(width)
    browser.get(report)
    root = "document.documentElement"
    assert browser.execute_script(f"return {root}.scrollWidth") == width
    assert browser.execute_script(WIDER_THAN_PAGE) == []
    rows = browser.find_elements(By.CSS_SELECTOR, "#candidates tbody th")
    assert [r.text for r in rows[:6]] == list(SIX)
    for label in browser.find_elements(By.CSS_SELECTOR, "#candidates figure"):
        assert label.is_displayed() and label.size["height"] > 100
    assert [e for e in browser.get_log("browser") if e["level"] == "SEVERE"] == []
    shot = tmp_path / f"report-{width}.png"
    assert browser.save_screenshot(str(shot)) and shot.stat().st_size > 10_000


def test_wide_tables_scroll_inside_their_box_on_a_phone(browse: Any, report: str) -> None:
    browser = browse(390)
    browser.get(report)
    box = browser.find_element(By.CSS_SELECTOR, "#efficiency .scroll")
    assert browser.execute_script("return arguments[0].scrollWidth > arguments[0].clientWidth", box)
    browser.execute_script("arguments[0].scrollLeft = 10000", box)
    head = box.find_element(By.CSS_SELECTOR, "tbody th")
    assert head.rect["x"] >= box.rect["x"]  # the candidate's name stays in view
    assert browser.execute_script("return scrollX") == 0


@pytest.mark.parametrize("dark", [False, True])
def test_text_is_readable_in_light_and_dark(browse: Any, report: str, dark: bool) -> None:
    browser = browse(1280, dark=dark)
    browser.get(report)
    worst, where = browser.execute_script(CONTRASTS)
    assert worst >= 4.5, f"{where} has a contrast of {worst:.2f}, WCAG AA asks for 4.5"
    page = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (page == "rgb(20, 23, 27)") is dark


def test_transcripts_colour_tokens_by_origin(browse: Any, report: str) -> None:
    browser = browse(1280)
    browser.get(report)
    colours = {
        name: browser.find_element(By.CSS_SELECTOR, f".transcript mark.{name}").value_of_css_property(
            "background-color"
        )
        for name in ("sampled", "observed", "inherited")
    }
    assert len(set(colours.values())) == 3
    legend = browser.find_element(By.CSS_SELECTOR, ".legend").text
    assert "written by the policy" in legend and "tool results" in legend
    segments = browser.find_elements(By.CSS_SELECTOR, "article:first-of-type details")
    assert len(segments) == 2
    segments[0].find_element(By.TAG_NAME, "summary").click()
    assert segments[0].get_attribute("open") is None


def test_section_links_lead_to_their_sections(browse: Any, report: str) -> None:
    browser = browse(390)
    browser.get(report)
    for link in browser.find_elements(By.CSS_SELECTOR, "nav a"):
        target = link.get_attribute("href").partition("#")[2]
        assert browser.find_element(By.ID, target).is_displayed()
