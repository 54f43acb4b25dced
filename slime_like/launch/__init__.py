"""One run on several nodes: who takes part, Ray on each of them, and how all of them learn how it ended."""
