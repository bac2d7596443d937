"""Hooks of mkdocs: the pages of the site that do not lie in docs/, and links that hold on the site and in a checkout.

    mkdocs build --strict      (mkdocs.yml names this file; `make docs`)

Markdown files of the root (README.md, CHANGELOG.md, ...) are pages, README.md the first one. Other files that a page
links to outside of docs/, such as outputs of benchmarks, are copied to the site under the path that they have here.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<=\]\()([^)#:\s]+)(?=[)#])")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the addresses of the repository and of the site from pyproject.toml, if it names them."""
    project = tomllib.loads((root(config) / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    addresses = {name.lower(): address for name, address in project.get("urls", {}).items()}
    config.repo_url = next((addresses[name] for name in ("repository", "source") if name in addresses), None)
    config.site_url = addresses.get("documentation")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and every file outside of docs/ that a page links to."""
    here = root(config)
    for path in sorted(here.glob("*.md")):
        files.append(File.generated(config, site_path(path.name), abs_src_path=str(path)))
    for page in list(files.documentation_pages()):
        for target in targets(page, Path(str(page.abs_src_path)).read_text(encoding="utf-8"), here):
            if files.get_file_from_path(site_path(target)) is None:
                files.append(File.generated(config, site_path(target), abs_src_path=str(here / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Files) -> str:
    """Return a page's text with links from page to page as they are on the site."""
    here, folder = root(config), posixpath.dirname(page.file.src_uri)

    def there(link: re.Match[str]) -> str:
        target = in_repository(page.file, link[0], here)
        return posixpath.relpath(site_path(target), folder or ".") if (here / target).is_file() else link[0]

    if config.repo_url:
        markdown = markdown.replace(f"]({config.repo_url.rstrip('/')}/blob/main/", "](")
    return LINK.sub(there, markdown)


def root(config: MkDocsConfig) -> Path:
    """Return the folder of mkdocs.yml."""
    return Path(str(config.config_file_path)).resolve().parent


def site_path(path: str) -> str:
    """Return where a file of the repository lies on the site."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if "/" in path else path.lower() if path.endswith(".md") else path


def targets(page: File, text: str, here: Path) -> Iterator[str]:
    """Yield the files of the repository that a page links to, by their paths from its root."""
    for link in LINK.findall(text):
        target = in_repository(page, link, here)
        if (here / target).is_file():
            yield target


def in_repository(page: File, link: str, here: Path) -> str:
    """Return the path, from the root of the repository, of a page's link."""
    own = Path(str(page.abs_src_path)).resolve().relative_to(here).as_posix()
    return posixpath.normpath(posixpath.join(posixpath.dirname(own), link))
