"""Console that treats a closed reader as an error, like ``print`` does."""

import rich.console


class Console(rich.console.Console):
    """Console of rich, which by itself would end the process before the command has written its files."""

    def on_broken_pipe(self) -> None:
        """Raise the ``BrokenPipeError`` that is being handled. Nothing more is written."""
        self.quiet = True
        raise
