"""Pages of the site that are files elsewhere in the repository, for MkDocs (mkdocs.yml).

README.md is the first page. A file of the repository that a page links to, such as a recipe, becomes
a page with its content. So every link leads somewhere on the site, without a network.
"""

import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
DOCS = "docs"
# Markdown files of the repository → pages.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md"}
# The text of a link that names its page: "runs.md" is shown as "Runs".
NAMED = re.compile(r"(?<=\[)([\w-]+\.md)(?=\]\()")
LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)#\s]+)(#[^)\s]*)?(?=\))")
LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".json": "json", ".ipynb": "json"}
MAX_BYTES = 200_000  # of a file that is shown


def on_files(files: Files, config) -> Files:
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        files.append(
            File.generated(config, page, content=rewrite_links(text, PurePosixPath(source)))
        )
    sources = {ROOT / source for source in PAGES} | set((ROOT / DOCS).glob("*.md"))
    for path in sorted(linked_files(sources)):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, source_page(name), content=show(path)))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    if page.file.src_uri in PAGES.values() or page.file.generated_by:
        return markdown
    named = NAMED.sub(lambda match: title_of(match[1]), markdown)
    return rewrite_links(named, PurePosixPath(DOCS) / page.file.src_uri)


def title_of(name: str) -> str:
    path = ROOT / DOCS / name
    title = re.search(r"^# (.+)$", path.read_text(), re.MULTILINE) if path.is_file() else None
    return title[1] if title else name


def linked_files(pages: set[Path]) -> set[Path]:
    """Returns the files and folders of the repository, outside docs/, that the pages link to."""
    targets = set()
    for page in pages:
        for target, _ in LINK.findall(page.read_text()):
            path = (page.parent / target).resolve()
            if path.exists() and is_shown(path):
                targets.add(path)
    return targets


def is_shown(path: Path) -> bool:
    """Returns whether a page shows the content of `path`: pages and pictures of docs/ are files of
    the site themselves.
    """
    name = path.relative_to(ROOT).as_posix()
    is_site_file = path.suffix in (".md", ".png") and path.parent == ROOT / DOCS
    return name not in PAGES and not is_site_file


def rewrite_links(text: str, source: PurePosixPath) -> str:
    """Returns the text of the file `source` with its links as they are between pages of the site."""

    def rewritten(match: re.Match) -> str:
        target, anchor = match[1], match[2] or ""
        path = (ROOT / source.parent / target).resolve()
        if not path.exists():
            return match[0]  # MkDocs says that the link is broken
        name = path.relative_to(ROOT).as_posix()
        if name in PAGES:
            return PAGES[name] + anchor
        return (source_page(name) if is_shown(path) else name.removeprefix(f"{DOCS}/")) + anchor

    return LINK.sub(rewritten, text)


def source_page(name: str) -> str:
    return f"source/{name.rstrip('/')}.md"


def show(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        names = sorted(
            child.name for child in path.iterdir() if not child.name.startswith(("_", "."))
        )
        return f"# {name}/\n\n" + "\n".join(f"- `{child}`" for child in names)
    content = path.read_text(errors="replace")[:MAX_BYTES]
    return f"# {name}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{content}\n````\n"
