"""What can go wrong here that is not the cache's: files, prompts, numbers.

The cache raises its own kinds.
"""

from __future__ import annotations

import os


class LlamaError(Exception):
    """Base of this example's errors."""


class OptionError(LlamaError, ValueError):
    """What was said on the command line cannot be done.

    The message begins with the option or the line concerned.
    """


class ModelFileError(LlamaError, ValueError):
    """A model file that is damaged, or of a model that this example does not compute.

    Parameters
    ----------
    path : the file.
    problem : what is wrong with it.
    """

    def __init__(self, path: str | os.PathLike[str], problem: str) -> None:
        self.path, self.problem = os.fspath(path), problem
        super().__init__(f"{self.path}: {problem}")


class WeightsMissing(LlamaError):
    """The weights are not on this machine; the message says how to get them."""


class PromptError(LlamaError, ValueError):
    """A prompt that cannot be computed.

    Empty, too long for the model or the cache, or of tokens it does not have.
    """


class PromptTooLong(PromptError):
    """A prompt of more tokens than there may be."""


class NumericsError(LlamaError, ArithmeticError):
    """The model computed logits that are not numbers.

    Raised inside the step, so nothing of it is committed.
    """
