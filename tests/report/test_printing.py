"""The page as PDF: which program prints it, and what is said if none does."""

import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vflsec.base.errors import UsageError
from vflsec.report import page
from vflsec.report.formats import Cells, Column, as_html
from vflsec.report.page import STYLE

PAGE = f"<!doctype html><title>t</title><style>{STYLE}</style><details><summary>s</summary>folded</details>"


def install(folder, monkeypatch, script, name="msedge"):
    """Put a program on a path that has nothing else but the tools of its script."""
    for tool in ("sh", "cat", "sleep"):
        (folder / tool).symlink_to(shutil.which(tool))
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_a_browser_of_the_path_prints_without_network(tmp_path, monkeypatch):
    print_ = 'for word; do case $word in --print-to-pdf=*) echo "$@" > "${word#*=}";; esac; done; exit 1'
    install(tmp_path, monkeypatch, print_)
    words = page.print_page(PAGE).decode()
    assert "--headless" in words
    assert "--host-resolver-rules=MAP * ~NOTFOUND" in words
    assert re.search(r"--user-data-dir=\S+/profile", words)


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo noise >&2; echo broken >&2", "broken"), ("exit 3", "exit code 3"), ("sleep 20", "more than 0.2 s")],
)
def test_a_browser_that_prints_nothing_is_one_line(tmp_path, monkeypatch, script, reason):
    install(tmp_path, monkeypatch, script)
    monkeypatch.setattr(page, "SECONDS", 0.2 if "sleep" in script else 30)
    with pytest.raises(UsageError, match=f"found none \\(.*{reason}\\): print the page of --html"):
        page.print_page(PAGE)


def test_without_a_browser_weasyprint_prints(tmp_path, monkeypatch):
    made = SimpleNamespace(HTML=lambda string: SimpleNamespace(write_pdf=string.encode))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(page, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "weasyprint", made)
    assert page.print_page(PAGE) == PAGE.encode()
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install weasyprint"):
        page.print_page(PAGE)


@pytest.mark.long
@pytest.mark.slow
def test_a_browser_of_this_machine_prints():
    if not any(map(shutil.which, page.BROWSERS)):
        pytest.skip("needs a browser")
    content = page.print_page(PAGE)
    assert content.startswith(b"%PDF-")
    assert content.rstrip().endswith(b"%%EOF")


COUNT_BROKEN = """<script>
let broken = 0, node, words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (node = words.nextNode()) if (node.parentElement.closest("td"))
  for (const word of node.data.matchAll(/[^\\s:=-]+/g)) {
    const range = document.createRange();
    range.setStart(node, word.index); range.setEnd(node, word.index + word[0].length);
    broken += range.getClientRects().length > 1;
  }
document.title = broken;
</script>"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("width", [680, 390])
@pytest.mark.parametrize("style", [STYLE, STYLE + "td { overflow-wrap: anywhere; max-width: 3em; }"])
def test_no_cell_breaks_within_a_word_on_paper_or_a_phone(tmp_path, width, style):
    """Paper in portrait is 680 pixels wide; the second style is one that breaks words."""
    browser = next(filter(None, map(shutil.which, page.BROWSERS)), None)
    if browser is None:
        pytest.skip("needs a browser")
    columns = [Column("", title=title, kind=kind) for title, kind in (("a", "name"), ("b", "prose"), ("c", "number"))]
    row = [
        "max-norm",
        "worst: attribute-fusion:column=PAY_6, spectral-embedding, 1/2 unconverged",
        "1.000 (.984 to 1.000)",
    ]
    titles = [*columns, *(column._replace(title=f"{column.title}{k}") for k in range(2) for column in columns)]
    table = as_html(Cells("t", titles, [row * 3]))
    shown = style.replace("@media print", "@media screen") if width > 640 else style
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><style>{shown}</style>{table}{COUNT_BROKEN}", "utf-8")
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},1200", "--dump-dom"]
    done = subprocess.run(
        [*words, f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ("<title>0</title>" in done.stdout) is (style == STYLE)
