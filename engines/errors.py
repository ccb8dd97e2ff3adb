"""The one exception type for failures that a user can cause."""


class OutriderError(Exception):
    """A failure that the user can cause and mend: the message says what is wrong, where, and what to do."""
