"""mkdocs builds the README as the first page, with links that suit its place."""

from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    with open("README.md", encoding="utf-8") as stream:
        text = stream.read()
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == "index.md":
        return markdown
    up = "../" * page.file.src_uri.count("/")
    return markdown.replace(f"]({up}../README.md", f"]({up}index.md")
