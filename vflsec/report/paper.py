"""A page as PDF, by a browser that is on the machine or by WeasyPrint, without network."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path

from vflsec.base.errors import UsageError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "msedge", "microsoft-edge")
SECONDS = 180
"""After which a browser has hung."""


def expect_printer() -> str:
    """Return the path of the first browser, or empty for WeasyPrint; raise UsageError if there is neither."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), "")
    if not browser and find_spec("weasyprint") is None:
        raise UsageError("expected Chromium, Chrome, Edge or WeasyPrint for --pdf, found none: pip install weasyprint")
    return browser


def print_page(html: str) -> bytes:
    """Return the PDF of a page, or raise UsageError if nothing prints it."""
    browser = expect_printer()
    if not browser:
        content: bytes = importlib.import_module("weasyprint").HTML(string=html).write_pdf()
        return content
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # a browser may still write into its profile
        page, paper = Path(name, "page.html"), Path(name, "page.pdf")
        page.write_text(html, "utf-8")
        words = [browser, "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        words += ["--host-resolver-rules=MAP * ~NOTFOUND", "--no-pdf-header-footer", f"--user-data-dir={name}/profile"]
        words += ["--no-sandbox"] * (os.geteuid() == 0)  # root has none; the page runs no script
        words += [f"--print-to-pdf={paper}", page.as_uri()]
        try:
            done = subprocess.run(words, capture_output=True, timeout=SECONDS, check=False)  # noqa: S603
            reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            reason = f"it took more than {SECONDS} s"
        except OSError as error:
            reason = str(error)
        if paper.is_file():
            return paper.read_bytes()
    raise UsageError(f"expected a PDF from {browser}, found none ({reason}): print the page of --html in a browser")
