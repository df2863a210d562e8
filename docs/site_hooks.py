"""mkdocs builds the README as the first page and every example as a page, with links that suit."""

import ast
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files


def on_files(files: Files, config: Any) -> Files:
    text = Path("README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=text.replace("](docs/", "](")))
    programs = sorted(Path("examples").glob("*.py"))
    listed = "".join(f"* [{each.name}]({each.stem}.md)\n" for each in programs)
    files.append(File.generated(config, "examples/index.md", content=f"# Examples\n\n{listed}"))
    for example in programs:
        code = example.read_text(encoding="utf-8")
        says = (ast.get_docstring(ast.parse(code)) or "").partition("\n")[0]
        page = f"# {example.name}\n\n{says}\n\n```python\n{code}```\n"
        files.append(File.generated(config, f"examples/{example.stem}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    up = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace("](examples)", "](examples/index.md)")
    for example in Path("examples").glob("*.py"):
        shown = f"{up}examples/{example.stem}.md"
        for home in (f"../{up}", up):
            markdown = markdown.replace(f"]({home}examples/{example.name})", f"]({shown})")
    return markdown if up == "" else markdown.replace(f"]({up}../README.md", f"]({up}index.md")
