"""Errors of the data a run is given. The message is all a user needs: where (file:line), what, and
what to do."""


class DataError(ValueError):
    """Data that cannot be trained on: malformed, empty, missing, or not those a checkpoint was
    written with."""


class BadDocumentError(DataError):
    """One document that cannot be trained on, whatever the options say; `data.on_bad = skip` leaves
    it out."""


class DataChangedError(DataError):
    """A file of the run's data was replaced, written to or removed since it was opened."""


class MissingPackageError(DataError, ImportError):
    """A source or tokenizer that needs an optional package which is not installed."""
