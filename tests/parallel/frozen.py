"""Imported last by the server that forks ranks: what it has imported is no garbage.

Otherwise every rank looks through it all, again and again, and copies each page of it as it looks. The table of names
in checkpoints, hundreds of patterns, would be made by every process that uses a model of transformers.
"""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")
gc.collect()
gc.freeze()
