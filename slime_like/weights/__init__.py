"""Weights on their way from trainer ranks to engines.

``orchestration/weight_sync.py`` drives, ``orchestration/trainer/rank_export.py`` sends.
"""
