"""A report in a real browser: it asks for nothing, nothing overlaps, and it prints."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pipeline.core import proc
from pipeline.serving.report.build import all_references, report_data
from pipeline.serving.report.page import render_page
from pipeline.serving.report.pdf import BROWSERS, print_pdf
from tests.unit.report.reports import MADE, as_data, sweep

BROWSER = next(filter(None, map(shutil.which, BROWSERS)), "")
if not BROWSER:
    pytest.skip("There is no browser here that draws without a screen.", allow_module_level=True)

# Every text of a chart against its neighbours, in pixels of the screen; and what is too wide.
MEASURE = """
const touching=[];
document.querySelectorAll("svg.chart").forEach(chart=>{
  const texts=[...chart.querySelectorAll("text")].map(t=>[t.textContent,t.getBoundingClientRect()]);
  const paper=chart.getBoundingClientRect();
  texts.forEach(([a,p],i)=>{
    if(p.left<paper.left-1||p.right>paper.right+1||p.bottom>paper.bottom+1)
      touching.push([a,"outside"]);
    texts.slice(i+1).forEach(([b,q])=>{
      const x=Math.min(p.right,q.right)-Math.max(p.left,q.left);
      const y=Math.min(p.bottom,q.bottom)-Math.max(p.top,q.top);
      if(x>1&&y>3)touching.push([a,b]);
    });
  });
});
const small=[...document.querySelectorAll("svg.chart text")]
  .map(t=>t.getBoundingClientRect().height);
document.title=JSON.stringify({touching,wide:document.documentElement.scrollWidth-innerWidth,
  width:innerWidth,charts:document.querySelectorAll("svg.chart").length,
  background:getComputedStyle(document.body).backgroundColor,
  open:document.getElementById("theme").hidden===false,small:Math.min(...small)});
"""


def whole_page() -> bytes:
    """Everything that a report can show: a sweep, published tables, memory, attempts."""
    run = as_data(sweep(1, 2, 8, 32, 64, 128, 256, 512))
    return render_page(report_data([run], list(all_references()), [], made=MADE))


def browse(page: Path, *args: str) -> str:
    as_root = ["--no-sandbox"] if os.geteuid() == 0 else []
    common = ["--headless=new", *as_root, "--disable-gpu", "--hide-scrollbars"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    env = proc.child_environment(HOME=str(page.parent))
    args = (BROWSER, *common, profile, *args, page.as_uri())
    done = proc.read(args, env=env, timeout_s=120)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def measured(tmp_path: Path, *args: str, style: str = "") -> dict[str, object]:
    """What a script finds in the page; for that, the page must allow another script."""
    text = whole_page().decode().replace("</style>", f"{style}</style>")
    text = re.sub(r"<meta http-equiv=[^>]*>", "", text)
    path = tmp_path / "measured.html"
    path.write_text(text.replace("</body>", f"<script>{MEASURE}</script></body>"))
    dom = browse(path, "--dump-dom", *args)
    found = re.search(r"<title>(.*?)</title>", dom, re.S)
    assert found
    answer: dict[str, object] = json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<"))
    return answer


@pytest.mark.parametrize("width", [1280, 768, 390])
def test_nothing_overlaps_or_is_too_wide(tmp_path: Path, width: int) -> None:
    found = measured(tmp_path, f"--window-size={width},2000")
    assert found["touching"] == []
    assert found["wide"] == 0
    assert isinstance(found["charts"], int)
    assert found["charts"] > 10
    assert isinstance(found["small"], float | int)
    assert found["small"] > 9


def test_texts_that_overlap_are_seen(tmp_path: Path) -> None:
    found = measured(tmp_path, style="svg text{font-size:22px!important}")
    assert found["touching"] != []


def test_the_page_is_dark_where_the_reader_s_screen_is(tmp_path: Path) -> None:
    light = measured(tmp_path, "--blink-settings=preferredColorScheme=1")
    dark = measured(tmp_path, "--blink-settings=preferredColorScheme=0")
    assert light["background"] == "rgb(255, 255, 255)"
    assert dark["background"] == "rgb(18, 22, 27)"


def asked(tmp_path: Path, page: bytes) -> set[str]:
    """All that a page makes the browser ask for; the browser's own questions to its maker apart."""
    path, net_log = tmp_path / "report.html", tmp_path / "net.json"
    path.write_bytes(page)
    browse(path, "--dump-dom", "--disable-background-networking", f"--log-net-log={net_log}")
    urls = set(re.findall(r'"url":"((?:https?|wss?|ftp)://[^"]+)"', net_log.read_text()))
    maker = (".google.com", ".googleapis.com", ".gvt1.com")
    return {url for url in urls if not (urlsplit(url).hostname or "").endswith(maker)}


ASKING = b'<img src="http://127.0.0.1:9/picture.png"></main>'


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    assert asked(tmp_path, whole_page()) == set()


def test_a_picture_that_somebody_adds_is_not_asked_for_either(tmp_path: Path) -> None:
    assert asked(tmp_path, whole_page().replace(b"</main>", ASKING)) == set()


def test_without_its_policy_such_a_picture_would_be_asked_for(tmp_path: Path) -> None:
    page = re.sub(rb"<meta http-equiv=[^>]*>", b"", whole_page()).replace(b"</main>", ASKING)
    assert asked(tmp_path, page) == {"http://127.0.0.1:9/picture.png"}


def test_its_own_script_runs_under_its_policy(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(whole_page())
    button = re.search(r'<button id="theme"[^>]*>', browse(path, "--dump-dom"))
    assert button
    assert "hidden" not in button[0]


def test_a_page_prints_as_pdf_of_several_pages(tmp_path: Path) -> None:
    print_pdf(whole_page(), tmp_path / "report.pdf")
    data = (tmp_path / "report.pdf").read_bytes()
    assert data.startswith(b"%PDF-")
    pages = len(re.findall(rb"/Type\s*/Page\b", data))
    assert 4 <= pages <= 30
