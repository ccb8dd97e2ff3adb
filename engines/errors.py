"""The one exception type for failures that a user can cause."""


class OutriderError(Exception):
    """A failure that the user can cause and mend: one line that says what is wrong, where, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.splitlines()))  # messages quote other libraries, which may use several lines


class DeviceMemoryError(OutriderError):
    """The GPU has too little memory."""
