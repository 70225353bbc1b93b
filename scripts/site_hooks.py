"""Lets pages of the site link to pages of the repository that are outside docs/, as they do where code is hosted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
OUTSIDE = (
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "RESULTS.md",
    "RESULTS.png",
    "benchmarks/*.md",
    "benchmarks/*.png",
    "notebooks/*.ipynb",
)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages outside docs/ under their own paths."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            files.append(File(name, str(ROOT), config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:  # noqa: ARG001  (the hook's form)
    """Turn links that leave docs/ into links within the site, and links into docs/ likewise."""
    where = page.file.src_uri
    if (ROOT / "docs" / where).exists():
        depth = where.count("/")
        return re.sub(rf"\]\({'../' * (depth + 1)}(?=[\w.])", f"]({'../' * depth}", markdown)
    return re.sub(r"\]\((\.\./)?docs/", r"](\1", markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:  # noqa: ARG001  (the hook's form)
    """Name the search for screen readers, and let the keyboard reach pictures that scroll on a narrow screen."""
    output = output.replace('class="md-search" ', 'class="md-search" aria-label="Search" ')
    return output.replace("<p><img ", '<p class="picture" tabindex="0"><img ')
