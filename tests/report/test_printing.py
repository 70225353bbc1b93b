"""The page as PDF: which program prints it, and what is said if none does."""

import re
import shutil
import sys
from types import SimpleNamespace

import pytest

from vflsec.base.errors import UsageError
from vflsec.report import page
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
