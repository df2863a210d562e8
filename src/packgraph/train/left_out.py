"""Documents that were cut or left out: said once when it first happens, and counted, so that none
is lost in silence.

Counts are those of the stream since the start of the run; a document that comes again in the next
epoch counts again.
"""

from collections.abc import Mapping
from typing import Any

from packgraph.train.data import Microbatches
from packgraph.train.progress import ProgressView

FIRST = {
    "split": "a document longer than every capacity was split into pieces",
    "dropped": "a document longer than every capacity was dropped (data.overlong = drop)",
    "empty": "an empty document was left out",
    "unlabelled": "a document without a token to predict was left out",
    "bad": "a bad document was left out (data.on_bad = skip)",
}


class LeftOut:
    """Watches the counts of a stream of packs."""

    def __init__(self, microbatches: Microbatches, view: ProgressView) -> None:
        self._microbatches, self._view = microbatches, view
        self._said: set[str] = set()

    def watch(self) -> None:
        """Say what has happened for the first time since this object was made."""
        counts = self.counts()
        for kind, text in FIRST.items():
            if counts[kind] and kind not in self._said:
                self._said.add(kind)
                which = f": {counts['first_bad'][0]}" if kind == "bad" else ""
                self._view.note(f"data: {text}{which}; summary.json counts them")

    def counts(self) -> dict[str, Any]:
        """packed: documents in packs, pieces count one by one; the documents of each kind of FIRST;
        and, if there are bad ones, what is wrong with the first of them."""
        bad = self._microbatches.bad
        report = self._microbatches.report
        return {
            "packed": report.documents,
            "split": report.split_documents,
            "dropped": report.dropped_documents,
            "dropped_tokens": report.dropped_tokens,
            "empty": self._microbatches.empty_documents,
            "unlabelled": self._microbatches.unlabelled_documents,
            "bad": bad.count,
            **({"first_bad": bad.first} if bad.count else {}),
        }


def left_out_line(documents: Mapping[str, Any]) -> str:
    """One line on the counts of a summary; empty when every document was packed whole."""
    words = {
        "split": "split",
        "dropped": f"dropped ({documents.get('dropped_tokens', 0):,} tokens)",
        "empty": "empty",
        "unlabelled": "without a token to predict",
        "bad": f"bad (the first: {'; '.join(documents.get('first_bad', ()))})",
    }
    found = [f"{documents[kind]:,} {text}" for kind, text in words.items() if documents.get(kind)]
    return f"documents: {documents.get('packed', 0):,} packed, {', '.join(found)}" if found else ""
