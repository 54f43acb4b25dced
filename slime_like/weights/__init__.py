"""Transfer of weights from trainer ranks to engines.

``orchestration/weight_sync.py`` drives it; ``orchestration/trainer/rank_export.py`` sends the weights.
"""
