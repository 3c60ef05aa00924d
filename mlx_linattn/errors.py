"""Every error a user can cause, in one tree.

A message is one sentence that says what is wrong, where, what was found and what was expected, and what to do.
Command-line programs print it on one line and exit with status 2; any other exception is a bug.
"""


class LinAttnError(Exception):
    """Base class of all errors that a user can mend."""


class CheckpointError(LinAttnError):
    """A model folder, a config or a weight file cannot be used as it is."""


class UnsupportedModelError(CheckpointError):
    """No architecture file answers for this model."""


class ShapeError(LinAttnError, ValueError):
    """An array does not have the shape that an operation documents."""


class StateError(LinAttnError, ValueError):
    """A state does not belong to this model, or does not reach back far enough."""


class MemoryLimitError(LinAttnError, MemoryError):
    """Something would need more memory than the limit allows. Raised before any of it is allocated."""


class SessionFileError(LinAttnError):
    """A session file cannot be used."""


class ConvertError(LinAttnError):
    """A conversion cannot be started or finished."""


class TokenizerError(LinAttnError):
    """A tokenizer or chat template is missing or cannot be used."""


class RequestError(LinAttnError, ValueError):
    """The arguments of a call make no sense together."""


class ContextLengthError(RequestError):
    """A prompt is longer than the most tokens that prompt and answer may have together."""


class ParityError(LinAttnError):
    """Two paths that should compute the same do not: what was measured on them would mean nothing."""


class BusyError(LinAttnError):
    """An engine's queue is full: ask again later."""


class ClosedError(LinAttnError):
    """An engine was closed, or its thread has failed."""


class ParallelError(LinAttnError):
    """The ranks that run one model together cannot go on, or do not fit together."""
