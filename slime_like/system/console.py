"""A console whose closed reader is an error, as it is for ``print``."""

import rich.console


class Console(rich.console.Console):
    """Rich's own ends the process with 1 instead, before the command has written its files."""

    def on_broken_pipe(self) -> None:
        """Called while a ``BrokenPipeError`` is handled; standard output is not written to again.

        Raises:
            BrokenPipeError: it.
        """
        self.quiet = True
        raise
