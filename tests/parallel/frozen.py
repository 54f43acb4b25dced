"""Freeze all imported objects in the server that forks ranks, which imports this module last.

Otherwise every rank's garbage collector would scan them repeatedly and so copy their pages. The table of checkpoint
names, with hundreds of patterns, would be built by every process that uses a model of transformers.
"""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()
gc.enable()
