"""From a configuration to its source of documents."""

from packgraph.train.data.config import DataConfig
from packgraph.train.data.jsonl_source import JsonLinesSource
from packgraph.train.data.parquet_source import ParquetSource
from packgraph.train.data.source import DocumentSource
from packgraph.train.data.stdlib_source import StandardLibrarySource
from packgraph.train.data.text_source import TextFolderSource

# Reading the whole library takes ten seconds; this many documents are three million tokens.
STDLIB_DOCUMENTS = 6000


def open_documents(config: DataConfig) -> DocumentSource:
    """The documents that `config` names, checked. Raises DataError saying where and what to do."""
    limit, skip_bad = config.max_documents_loaded, config.on_bad == "skip"
    if config.source == "stdlib":
        return StandardLibrarySource(STDLIB_DOCUMENTS if limit is None else limit)
    path = config.path or ""
    if config.source == "jsonl":
        return JsonLinesSource(path, config.text_column, limit, skip_bad=skip_bad)
    if config.source == "text":
        return TextFolderSource(path, config.suffixes, limit, skip_bad=skip_bad)
    return ParquetSource(path, config.text_column, limit, skip_bad=skip_bad)
